// CRC32C (Castagnoli, RFC 3720 appendix B.4): the digest of every stored part.
//
// Cheap enough to be computed in the copy loop. The implementation is picked at run time: folding by carry-less multiplications of 512 bits, the SSE4.2 instruction on
// three interleaved streams (beside folding, where that is of 256 bits), or slicing by 8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kv {

// CRC32C of `size` bytes, continuing from `crc` (0 to start).
uint32_t crc32c(const void* data, size_t size, uint32_t crc = 0);

// Copies `size` bytes (no overlap) and returns the CRC32C, continued from `crc`, of the bytes that
// were written: a source that changes meanwhile cannot make the two differ.
uint32_t copy_crc32c(void* dst, const void* src, size_t size, uint32_t crc = 0);

struct Crc32cBackend {
  const char* name;
  uint32_t (*crc)(const void* data, size_t size, uint32_t crc);
  uint32_t (*copy)(uint8_t* to, const uint8_t* from, size_t size, uint32_t crc);
};
// What this processor can do, the fastest first: that is what the functions above use.
const std::vector<Crc32cBackend>& crc32c_backends();

// The fallback, for tests.
uint32_t crc32c_portable(const void* data, size_t size, uint32_t crc = 0);

}  // namespace kv
