// Arithmetic modulo the polynomial of CRC32C.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace kv {

inline constexpr uint32_t kCrc32cPolynomial = 0x82F63B78u;  // reflected: bit 31 is x^0

// a(x) * b(x) modulo the polynomial, both reflected.
constexpr uint32_t crc32c_multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b >> 1) ^ (kCrc32cPolynomial & (0u - (b & 1)));
  }
  return product;
}

// x^n: appending n zero bits multiplies a CRC by it.
constexpr uint32_t crc32c_power(uint64_t n) {
  uint32_t power = 1u << 31;         // x^0
  uint32_t square = 1u << (31 - 1);  // x^1
  for (; n != 0; n >>= 1) {
    if (n & 1) power = crc32c_multiply(square, power);
    square = crc32c_multiply(square, square);
  }
  return power;
}

// The powers that fold a lane over `bits`. Each half is 32 bits off the middle, and a product of
// reflected numbers is one bit short: hence 31 and 33.
struct FoldPowers {
  uint64_t low, high;
};
constexpr FoldPowers fold_powers(uint64_t bits) {
  return {crc32c_power(bits + 31), crc32c_power(bits - 33)};
}

// The value of a CRC after so many zero bytes, by each of its four bytes.
using ShiftTables = std::array<std::array<uint32_t, 256>, 4>;
constexpr ShiftTables make_shift_tables(size_t bytes) {
  ShiftTables tables{};
  const uint32_t power = crc32c_power(8 * bytes);
  for (uint32_t k = 0; k < 4; ++k)
    for (uint32_t i = 0; i < 256; ++i) tables[k][i] = crc32c_multiply(i << (8 * k), power);
  return tables;
}
inline uint64_t shift(const ShiftTables& tables, uint64_t crc) {
  return tables[0][crc & 0xFF] ^ tables[1][(crc >> 8) & 0xFF] ^ tables[2][(crc >> 16) & 0xFF] ^
         tables[3][(crc >> 24) & 0xFF];
}

}  // namespace kv
