// Bounds of a JSON text of a peer, found before anything is made of it.
#pragma once

#include <string_view>

namespace kv {

struct JsonBounds {
  size_t values = 0;      // and names of members
  size_t containers = 0;  // arrays and objects, which cost most to make
  size_t levels = 0;      // of containers
};

// Whether `text` is within these bounds. It is not validated: what is no JSON is counted as if it
// were.
bool json_within(std::string_view text, const JsonBounds& bounds);

}  // namespace kv
