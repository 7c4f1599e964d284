// Whose key a request brings: from its Authorization to the SHA-256 by which the router knows keys.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace kv {

// A longer Authorization is no key: it is not hashed.
inline constexpr size_t kMaxAuthorization = 2048;

// The key of `Bearer KEY` (RFC 6750; the scheme in any case, blanks and tabs around the key are not
// its): writes its digest to `out` (32 bytes). False: there is no such key, nothing was written.
bool bearer_digest(std::string_view authorization, uint8_t* out);

}  // namespace kv
