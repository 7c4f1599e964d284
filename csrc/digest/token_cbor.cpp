#include "digest/token_cbor.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>

#include "base/processor.h"
#endif

namespace kv {
namespace {

// Bits that no token of 0..2^32-1 has set in its type; a negative one has some.
template <class Token> constexpr uint64_t kNoTokenBits =
    std::is_same_v<Token, int64_t>   ? ~uint64_t{UINT32_MAX}
    : std::is_same_v<Token, int32_t> ? uint64_t{1} << 31
                                     : 0;

// kRun tokens in two passes: the first, without branches and in a form that compilers vectorise,
// finds bytes and lengths; the second stores them. Token ids are unpredictable: a mispredicted
// length per token would cost as much as hashing it.
constexpr size_t kRun = 32;

template <class Token>
inline __attribute__((always_inline)) uint8_t* put_run(uint8_t* at, const Token* tokens,
                                                       size_t count, uint64_t& bits) {
  uint64_t words[kRun];
  uint32_t sizes[kRun];
  for (size_t k = 0; k < kRun; ++k) {
    const auto token = static_cast<uint32_t>(tokens[k]);
    bits |= static_cast<std::make_unsigned_t<Token>>(tokens[k]);
    const uint32_t one = token > 23, two = token > 0xFF, four = token > 0xFFFF;
    const uint64_t value = __builtin_bswap32(token) >> (24 - 8 * two - 16 * four);
    words[k] = value << (8 * one) | (0x18 * one + two + four);
    sizes[k] = 1 + one + two + 2 * four;
  }
  for (size_t k = 0; k < count; ++k) {
    std::memcpy(at, &words[k], sizeof words[k]);
    at += sizes[k];
  }
  return at;
}

template <class Token>
inline __attribute__((always_inline)) uint8_t* put_all(uint8_t* at, const Token* tokens,
                                                       size_t count, bool& bad) {
  uint64_t bits = 0;
  for (; count >= kRun; tokens += kRun, count -= kRun) at = put_run(at, tokens, kRun, bits);
  if (count != 0) {
    Token padded[kRun] = {};
    std::copy_n(tokens, count, padded);
    at = put_run(at, padded, count, bits);
  }
  bad |= (bits & kNoTokenBits<Token>) != 0;
  return at;
}

#if defined(__x86_64__)
#define KV_VBMI2 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi2,popcnt")))

const Processor kProcessor = processor();

template <class Token>
__attribute__((target("avx2"))) uint8_t* put_all_avx2(uint8_t* at, const Token* tokens,
                                                      size_t count, bool& bad) {
  return put_all(at, tokens, count, bad);
}

// Eight tokens at a time: each becomes a head and four bytes in a lane of eight, and one
// instruction (VPCOMPRESSB) removes the bytes that its encoding does not have.
template <class Token>
KV_VBMI2 uint8_t* put_compressed(uint8_t* at, const Token* tokens, size_t count, bool& bad) {
  // Per lane of 16 bytes: nothing, then bytes 3 to 0 of the first token; the same of the second.
  constexpr auto kSecond = static_cast<int64_t>(0x80808008090A0B80);
  constexpr auto kFirst = static_cast<int64_t>(0x8080800001020380);
  const __m512i big_endian =
      _mm512_set_epi64(kSecond, kFirst, kSecond, kFirst, kSecond, kFirst, kSecond, kFirst);
  __m512i bits = _mm512_setzero_si512();
  for (size_t done = 0; done < count; done += 8) {
    const auto lanes = static_cast<__mmask8>(count - done < 8 ? (1u << (count - done)) - 1 : 0xFF);
    __m512i token;
    if constexpr (sizeof(Token) == 8) token = _mm512_maskz_loadu_epi64(lanes, tokens + done);
    else token = _mm512_maskz_cvtepu32_epi64(lanes, _mm256_maskz_loadu_epi32(lanes, tokens + done));
    bits = _mm512_or_si512(bits, token);
    const __mmask8 one = _mm512_cmpgt_epu64_mask(token, _mm512_set1_epi64(23));
    const __mmask8 two = _mm512_cmpgt_epu64_mask(token, _mm512_set1_epi64(0xFF));
    const __mmask8 four = _mm512_cmpgt_epu64_mask(token, _mm512_set1_epi64(0xFFFF));
    __m512i head = _mm512_maskz_mov_epi64(one, _mm512_set1_epi64(0x18));
    head = _mm512_mask_add_epi64(head, two, head, _mm512_set1_epi64(1));
    head = _mm512_mask_add_epi64(head, four, head, _mm512_set1_epi64(1));
    __m512i kept = _mm512_maskz_mov_epi64(lanes, _mm512_set1_epi64(0xFF00000000));
    kept = _mm512_mask_or_epi64(kept, one, kept, _mm512_set1_epi64(0xFF));
    kept = _mm512_mask_or_epi64(kept, two, kept, _mm512_set1_epi64(0xFF000000));
    kept = _mm512_mask_or_epi64(kept, four, kept, _mm512_set1_epi64(0xFFFF00));
    const __mmask64 bytes = _mm512_movepi8_mask(kept);
    const __m512i laid_out = _mm512_or_si512(head, _mm512_shuffle_epi8(token, big_endian));
    _mm512_storeu_si512(at, _mm512_maskz_compress_epi8(bytes, laid_out));
    at += __builtin_popcountll(bytes);
  }
  const __m512i no_token = _mm512_set1_epi64(static_cast<int64_t>(kNoTokenBits<Token>));
  bad |= _mm512_test_epi64_mask(bits, no_token) != 0;
  return at;
}
#endif

}  // namespace

template <class Token>
uint8_t* put_tokens_portable(uint8_t* at, const Token* tokens, size_t count, bool& bad) {
#if defined(__x86_64__)
  if (kProcessor.avx2) return put_all_avx2(at, tokens, count, bad);
#endif
  return put_all(at, tokens, count, bad);
}

template <class Token>
uint8_t* put_tokens(uint8_t* at, const Token* tokens, size_t count, bool& bad) {
#if defined(__x86_64__)
  if (kProcessor.avx512vbmi2) return put_compressed(at, tokens, count, bad);
#endif
  return put_tokens_portable(at, tokens, count, bad);
}

template uint8_t* put_tokens(uint8_t*, const uint32_t*, size_t, bool&);
template uint8_t* put_tokens(uint8_t*, const int32_t*, size_t, bool&);
template uint8_t* put_tokens(uint8_t*, const int64_t*, size_t, bool&);
template uint8_t* put_tokens_portable(uint8_t*, const uint32_t*, size_t, bool&);
template uint8_t* put_tokens_portable(uint8_t*, const int32_t*, size_t, bool&);
template uint8_t* put_tokens_portable(uint8_t*, const int64_t*, size_t, bool&);

}  // namespace kv
