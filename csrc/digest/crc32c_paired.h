// CRC32C for processors with SSE 4.2 and carry-less multiplication of 256 bits (x86-64), on two of
// their units at once.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kv {

// What one round takes: just less than 64 KiB.
inline constexpr size_t kPairedSteps = 240, kPairedBytes = kPairedSteps * 272;

// As crc32c(), of kPairedBytes.
uint32_t paired_crc32c(const uint8_t* data, uint32_t crc);

}  // namespace kv
