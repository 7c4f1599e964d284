#include "router/json_bounds.h"

namespace kv {

namespace {

// The byte behind the string that begins before `at`; `end` where it does not end. A byte at a time:
// as fast for a text of escapes, which memchr() would find one by one.
const char* behind_string(const char* at, const char* end) {
  for (bool escaped = false; at < end; ++at) {
    if (*at == '"' && !escaped) return at + 1;
    escaped = *at == '\\' && !escaped;
  }
  return end;
}

}  // namespace

bool json_within(std::string_view text, const JsonBounds& bounds) {
  size_t values = 1, containers = 0, levels = 0;
  const char* end = text.data() + text.size();
  for (const char* at = text.data(); at < end;) {
    switch (*at++) {
      case '"': at = behind_string(at, end); break;
      case '[': case '{':
        if (++levels > bounds.levels || ++containers > bounds.containers) return false;
        [[fallthrough]];
      case ',': case ':':
        if (++values > bounds.values) return false;
        break;
      case ']': case '}': levels -= levels > 0; break;
      default: break;
    }
  }
  return true;
}

}  // namespace kv
