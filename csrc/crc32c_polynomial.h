// Arithmetic modulo the polynomial of CRC32C.
#pragma once

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

// x^n: what appending n zero bits multiplies a CRC with.
constexpr uint32_t crc32c_power(uint64_t n) {
  uint32_t power = 1u << 31;         // x^0
  uint32_t square = 1u << (31 - 1);  // x^1
  for (; n != 0; n >>= 1) {
    if (n & 1) power = crc32c_multiply(square, power);
    square = crc32c_multiply(square, square);
  }
  return power;
}

}  // namespace kv
