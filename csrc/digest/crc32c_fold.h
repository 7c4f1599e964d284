// CRC32C by folding: for processors with SSE 4.2 and carry-less multiplication of 512 bits (x86-64).
#pragma once

#include <cstddef>
#include <cstdint>

namespace kv {

// How many of so many bytes are to be folded: whole rounds, or none where there are too few.
constexpr size_t fold_rounds(size_t size) {
  constexpr size_t kRound = 256, kLeast = 1024;
  return size < kLeast ? 0 : size / kRound * kRound;
}

// As crc32c() and copy_crc32c(), of fold_rounds(...) > 0 bytes.
uint32_t fold_crc32c(const uint8_t* data, size_t size, uint32_t crc);
uint32_t fold_copy_crc32c(uint8_t* to, const uint8_t* from, size_t size, uint32_t crc);

}  // namespace kv
