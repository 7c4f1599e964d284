#include "token_ids.h"

#include <algorithm>

namespace kv {
namespace {

const char* skip_space(const char* p, const char* end) {
  while (p != end && detail::is_space(*p)) ++p;
  return p;
}

// The items from `p` on, behind the opening bracket; the position behind the closing one, or null.
const char* parse_items(const char* p, const char* end, std::vector<uint32_t>& ids) {
  for (;;) {
    uint32_t id = 0;
    p = parse_token_id(skip_space(p, end), end, &id);
    if (p == nullptr) return nullptr;
    ids.push_back(id);
    p = skip_space(p, end);
    if (p == end) return nullptr;
    if (*p == ']') return p + 1;
    if (*p++ != ',') return nullptr;
  }
}

}  // namespace

TokenIdsMember find_token_ids(std::string_view text, std::string_view key) {
  TokenIdsMember found;
  const char* const end = text.data() + text.size();
  const size_t name = key.size() + 2;  // with its quotes
  for (size_t at = text.find(key, 1); at != std::string_view::npos; at = text.find(key, at + 1)) {
    if (text[at - 1] != '"' || at - 1 + name >= text.size() || text[at + key.size()] != '"') continue;
    const char* p = skip_space(text.data() + at - 1 + name, end);
    if (p == end || *p != ':') continue;
    p = skip_space(p + 1, end);
    if (p == end || *p != '[') continue;
    found.ids.reserve(std::min<size_t>(static_cast<size_t>(end - p) / 4, 1u << 16));
    const char* after = parse_items(p + 1, end, found.ids);
    if (after != nullptr) {
      found.start = static_cast<size_t>(p - text.data());
      found.end = static_cast<size_t>(after - text.data());
      return found;
    }
    found.ids.clear();
  }
  return found;
}

}  // namespace kv
