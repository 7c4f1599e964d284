// Token ids in JSON: arrays of integers 0..2^32-1, the bulk of a long prompt.
#pragma once

#include <string_view>
#include <vector>

namespace kv {

// Parse a non-empty array of token ids, with `p` at its opening bracket, and append them to `ids`.
// Return the position after its closing bracket; null for anything else (`ids` may have grown).
const char* parse_token_ids(const char* p, const char* end, std::vector<uint32_t>& ids);

struct TokenIdsMember {
  size_t start = 0;  // of the array, in bytes
  size_t end = 0;    // 0 where there is none
  std::vector<uint32_t> ids;
};

// Find the first member `key` of any object in the JSON `text` whose value is a non-empty array of
// token ids. The text is not validated otherwise: a name in unescaped quotes before a colon cannot
// occur within a JSON string, so a search finds members only.
TokenIdsMember find_token_ids(std::string_view text, std::string_view key);

}  // namespace kv
