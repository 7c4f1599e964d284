#include "router/token_ids.h"

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace kv {
namespace {

constexpr size_t kLook = 64;    // bytes looked at in one step
constexpr size_t kRoom = 1024;  // items parsed before they are appended

bool is_digit(unsigned char c) { return static_cast<unsigned char>(c - '0') < 10; }

bool is_space(char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }

// Whether `c` may follow an item of an array.
bool ends_item(char c) { return c == ',' || c == ']' || is_space(c); }

const char* skip_space(const char* p, const char* end) {
  while (p != end && is_space(*p)) ++p;
  return p;
}

// The value of `n` (1..8) ASCII digits, the first in the lowest byte, three multiplications in all:
// digits become pairs, pairs quadruples, quadruples the number.
uint32_t parse_digits(uint64_t chunk, size_t n) {
  chunk <<= 8 * (8 - n);  // leading zero bytes count as zeros below
  chunk &= 0x0F0F0F0F0F0F0F0Full;
  chunk = (chunk * 10 + (chunk >> 8)) & 0x00FF00FF00FF00FFull;
  chunk = (chunk * 100 + (chunk >> 16)) & 0x0000FFFF0000FFFFull;
  return static_cast<uint32_t>(chunk * 10000 + (chunk >> 32));
}

// A mask of the kLook bytes that are not digits.
uint64_t others(const char* p) {
  uint64_t mask = 0;
#if defined(__SSE2__)
  for (size_t i = 0; i < kLook; i += 16) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i));
    const __m128i value = _mm_sub_epi8(bytes, _mm_set1_epi8('0'));
    const __m128i digit = _mm_cmpeq_epi8(_mm_min_epu8(value, _mm_set1_epi8(9)), value);
    mask |= static_cast<uint64_t>(~_mm_movemask_epi8(digit) & 0xFFFF) << i;
  }
#else
  for (size_t i = 0; i < kLook; ++i) {
    mask |= static_cast<uint64_t>(!is_digit(static_cast<unsigned char>(p[i]))) << i;
  }
#endif
  return mask;
}

// Take items of one to eight digits that end with "," or ", "; return the start of the first other
// one. The ends are found 64 bytes at a time, so that the processor parses several items at once.
const char* parse_run(const char* p, const char* end, std::vector<uint32_t>& ids) {
  uint32_t found[kRoom];
  size_t count = 0;
  bool plain = true;
  for (const char* look = p; plain && static_cast<size_t>(end - look) >= kLook + 16;
       look += kLook) {
    for (uint64_t mask = others(look); mask != 0; mask &= mask - 1) {
      const char* stop = look + __builtin_ctzll(mask);
      const auto n = static_cast<size_t>(stop - p);
      if (*stop == ',' && n - 1 < 8 && (*p != '0' || n == 1)) {
        uint64_t chunk = 0;
        std::memcpy(&chunk, p, sizeof chunk);
        found[count++] = parse_digits(chunk, n);
        p = stop + 1;
      } else if (*stop == ' ' && n == 0 && p[-1] == ',') {
        ++p;
      } else {
        plain = false;
        break;
      }
    }
    if (count > kRoom - kLook) {
      ids.insert(ids.end(), found, found + count);
      count = 0;
    }
  }
  ids.insert(ids.end(), found, found + count);
  return p;
}

// Parse one token id without leading zeros; return the position after it, or null.
const char* parse_item(const char* p, const char* end, uint32_t* id) {
  const char* first = p;
  uint64_t v = 0;
  while (p != end && is_digit(static_cast<unsigned char>(*p)) && p - first < 11) {
    v = v * 10 + static_cast<uint64_t>(*p++ - '0');
  }
  const bool valid = p != first && v <= UINT32_MAX && !(*first == '0' && p - first > 1) &&
                     p != end && ends_item(*p);
  *id = static_cast<uint32_t>(v);
  return valid ? p : nullptr;
}

}  // namespace

const char* parse_token_ids(const char* p, const char* end, std::vector<uint32_t>& ids) {
  if (p == end || *p != '[') return nullptr;
  ids.reserve(ids.size() + std::min<size_t>(static_cast<size_t>(end - p) / 4, 1u << 16));
  for (;;) {
    p = skip_space(parse_run(skip_space(p + 1, end), end, ids), end);
    uint32_t id = 0;
    p = parse_item(p, end, &id);
    if (p == nullptr) return nullptr;
    ids.push_back(id);
    p = skip_space(p, end);
    if (p == end) return nullptr;
    if (*p == ']') return p + 1;
    if (*p != ',') return nullptr;
  }
}

TokenIdsMember find_token_ids(std::string_view text, std::string_view key) {
  TokenIdsMember found;
  const char* const end = text.data() + text.size();
  const size_t name = key.size() + 2;  // with its quotes
  for (size_t at = text.find(key, 1); at != std::string_view::npos; at = text.find(key, at + 1)) {
    if (text[at - 1] != '"' || at - 1 + name >= text.size() || text[at + key.size()] != '"')
      continue;
    const char* p = skip_space(text.data() + at - 1 + name, end);
    if (p == end || *p != ':') continue;
    p = skip_space(p + 1, end);
    const char* after = parse_token_ids(p, end, found.ids);
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
