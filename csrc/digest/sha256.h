// SHA-256 (FIPS 180-4), by OpenSSL's libcrypto if the process can load it, else by our own code.
//
// libcrypto is opened at run time (its SHA256_* functions are a stable ABI): the wheel is not
// linked with OpenSSL. Its assembly is about 1.5 times as fast as portable code.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kv {

inline constexpr size_t kSha256Bytes = 32;

// Writes the digest of `size` bytes to `out` (32 bytes).
void sha256(const void* data, size_t size, uint8_t* out);

// The same for a message in a buffer of size + kSha256Room bytes, which is padded in place: 10 %
// faster for messages of a few hundred bytes.
inline constexpr size_t kSha256Room = 72;
void sha256_padding(uint8_t* data, size_t size, uint8_t* out);

// The fallback, for tests.
void sha256_portable(const void* data, size_t size, uint8_t* out);

}  // namespace kv
