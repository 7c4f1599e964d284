// CRC32C (Castagnoli, RFC 3720 appendix B.4): the digest of every stored part.
//
// Cheap enough to be computed in the copy loop. The fastest implementation for the processor is
// chosen at run time: folding of 512 bits, folding of 256 bits beside the SSE4.2 instruction, that
// instruction or aarch64's on three interleaved streams, or slicing by 8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kv {

// CRC32C of `size` bytes, continuing from `crc` (0 to start).
uint32_t crc32c(const void* data, size_t size, uint32_t crc = 0);

// Copies `size` bytes (no overlap) and returns the CRC32C, continued from `crc`, of the written
// bytes, also if the source changes meanwhile.
uint32_t copy_crc32c(void* dst, const void* src, size_t size, uint32_t crc = 0);

struct Crc32cBackend {
  const char* name;
  uint32_t (*crc)(const void* data, size_t size, uint32_t crc);
  uint32_t (*copy)(uint8_t* to, const uint8_t* from, size_t size, uint32_t crc);
};
// What this processor supports, the fastest first (the functions above use that), the portable one
// last.
const std::vector<Crc32cBackend>& crc32c_backends();

}  // namespace kv
