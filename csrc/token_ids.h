// Token ids in JSON: arrays of integers 0..2^32-1, parsed eight digits at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

namespace kv {

namespace detail {

inline bool is_digit(unsigned char c) { return static_cast<unsigned char>(c - '0') < 10; }

inline bool is_space(char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }

// Whether `c` may follow an item of an array.
inline bool ends_item(char c) { return c == ',' || c == ']' || is_space(c); }

// The value of the `n` (1..8) ASCII digits that `chunk` begins with, three multiplications in all:
// digits become pairs, pairs quadruples, quadruples the number.
inline uint64_t parse_digits(uint64_t chunk, unsigned n) {
  chunk <<= 8 * (8 - n);  // leading zero bytes count as zeros below
  chunk &= 0x0F0F0F0F0F0F0F0Full;
  chunk = (chunk * 10 + (chunk >> 8)) & 0x00FF00FF00FF00FFull;
  chunk = (chunk * 100 + (chunk >> 16)) & 0x0000FFFF0000FFFFull;
  return (chunk * 10000 + (chunk >> 32)) & 0xFFFFFFFFull;
}

// How many of the 8 bytes, from the lowest on, are ASCII digits.
inline unsigned count_digits(uint64_t chunk) {
  const uint64_t high = (chunk & 0xF0F0F0F0F0F0F0F0ull) ^ 0x3030303030303030ull;
  const uint64_t low = ((chunk & 0x0F0F0F0F0F0F0F0Full) + 0x0606060606060606ull) & 0x1010101010101010ull;
  const uint64_t other = high | low;
  return other == 0 ? 8 : static_cast<unsigned>(__builtin_ctzll(other)) / 8;
}

}  // namespace detail

// Parse one token id without leading zeros, followed by what may follow an item of an array; return
// the position after it, or null. Inline: it is the loop of a long prompt.
inline const char* parse_token_id(const char* p, const char* end, uint32_t* id) {
  const char* first = p;
  uint64_t v = 0;
  if (end - p > 8) {
    uint64_t chunk = 0;
    std::memcpy(&chunk, p, 8);
    const unsigned n = detail::count_digits(chunk);
    if (n == 0) return nullptr;
    v = detail::parse_digits(chunk, n);
    p += n;
  }
  while (p != end && detail::is_digit(static_cast<unsigned char>(*p)) && p - first < 11) {
    v = v * 10 + static_cast<uint64_t>(*p++ - '0');
  }
  const bool valid = p != first && v <= UINT32_MAX && !(*first == '0' && p - first > 1) &&
                     p != end && detail::ends_item(*p);
  *id = static_cast<uint32_t>(v);
  return valid ? p : nullptr;
}

struct TokenIdsMember {
  size_t start = 0;  // of the array, in bytes
  size_t end = 0;    // 0 where there is none
  std::vector<uint32_t> ids;
};

// Find the first member `key` of any object in the JSON `text` whose value is a non-empty array of
// token ids. The text is not validated otherwise: a name in unescaped quotes before a colon cannot
// stand within a JSON string, so a search finds members only.
TokenIdsMember find_token_ids(std::string_view text, std::string_view key);

}  // namespace kv
