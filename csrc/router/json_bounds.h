// Bounds of a JSON text of a peer, found before anything is made of it.
#pragma once

#include <string_view>

namespace kv {

// Whether `text` has at most so many values and levels. The text is not validated: what is no JSON
// is counted as if it were.
bool json_within(std::string_view text, size_t max_values, size_t max_levels);

}  // namespace kv
