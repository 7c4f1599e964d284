// CRC32C (Castagnoli, RFC 3720 appendix B.4): the digest of every stored part.
//
// Chosen for being combinable and cheap enough to be computed in the copy loop. The implementation
// is picked at run time: the SSE4.2 instruction on three interleaved streams, or slicing by 8.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kv {

// CRC32C of `size` bytes, continuing from `crc` (0 to start).
uint32_t crc32c(const void* data, size_t size, uint32_t crc = 0);

// CRC32C of A+B from crc32c(A), crc32c(B) and B's length. O(log size_b).
uint32_t crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t size_b);

// Copies `size` bytes (no overlap) and returns the CRC32C, continued from `crc`, of the bytes that
// were written: a source that changes meanwhile cannot make the two differ.
uint32_t copy_crc32c(void* dst, const void* src, size_t size, uint32_t crc = 0);

// "sse4.2" or "portable".
const char* crc32c_backend();

// The fallback, for tests.
uint32_t crc32c_portable(const void* data, size_t size, uint32_t crc = 0);

}  // namespace kv
