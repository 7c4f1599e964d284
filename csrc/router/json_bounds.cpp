#include "router/json_bounds.h"

#include <cstring>

namespace kv {

namespace {

// The byte behind the string that begins before `at`; `end` where it does not end.
const char* behind_string(const char* at, const char* end) {
  for (;;) {
    const auto* quote = static_cast<const char*>(memchr(at, '"', static_cast<size_t>(end - at)));
    if (quote == nullptr) return end;
    const char* before = quote;
    while (before > at && before[-1] == '\\') --before;
    if ((quote - before) % 2 == 0) return quote + 1;
    at = quote + 1;
  }
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
