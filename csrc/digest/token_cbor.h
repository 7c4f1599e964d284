// Token ids as canonical CBOR unsigned integers (RFC 8949 section 3.1), one after the other: most
// of the bytes that block hashes are computed from.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kv {

inline constexpr size_t kTokenCborBytes = 5;  // of one token at most
inline constexpr size_t kTokenCborRoom = 64;  // bytes after the last that may be overwritten

// Write `count` tokens to `at`, which has kTokenCborBytes for each and kTokenCborRoom more; return
// the end of what was written. Sets `bad`, and writes anything, if one is not in 0..2^32-1. Token
// is uint32_t, int32_t or int64_t.
template <class Token>
uint8_t* put_tokens(uint8_t* at, const Token* tokens, size_t count, bool& bad);

// For processors without AVX-512 VBMI2, and for tests.
template <class Token>
uint8_t* put_tokens_portable(uint8_t* at, const Token* tokens, size_t count, bool& bad);

}  // namespace kv
