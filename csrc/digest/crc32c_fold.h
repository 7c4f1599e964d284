// CRC32C by carry-less multiplication (folding): two kernels for x86-64 with SSE 4.2.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kv {

// FOLDING of 512 bits at a time: AVX-512.
// How many of `size` bytes are to be folded: whole rounds, or none if there are too few.
constexpr size_t fold_rounds(size_t size) {
  constexpr size_t kRound = 256, kLeast = 1024;
  return size < kLeast ? 0 : size / kRound * kRound;
}
// As crc32c() and copy_crc32c(), of fold_rounds(...) > 0 bytes.
uint32_t fold_crc32c(const uint8_t* data, size_t size, uint32_t crc);
uint32_t fold_copy_crc32c(uint8_t* to, const uint8_t* from, size_t size, uint32_t crc);

// PAIRED: folding of 256 bits (AVX2) beside the CRC32 instruction, which another unit of a core
// runs.
// The bytes of one round: just below 64 KiB.
inline constexpr size_t kPairedSteps = 240, kPairedBytes = kPairedSteps * 272;
// As crc32c(), of kPairedBytes.
uint32_t paired_crc32c(const uint8_t* data, uint32_t crc);

}  // namespace kv
