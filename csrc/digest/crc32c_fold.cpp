// V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction" (Intel,
// 2009), in lanes of 512 bits: a lane that stands n bits before another is worth it times x^n, and adding
// that product, modulo the polynomial, to the other leaves the CRC of both as it was. Both halves of each
// 128 bits are multiplied by themselves, each with its own power.
#include "digest/crc32c_fold.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "digest/crc32c_polynomial.h"

// GCC takes the undefined operands of its own intrinsics for mistakes (bug 105593).
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#define KV_FOLDS __attribute__((target("avx512f,vpclmulqdq,pclmul,sse4.2")))

namespace kv {
namespace {

constexpr size_t kLane = 64, kLanes = 4;

constexpr FoldPowers kRound = fold_powers(kLanes * kLane * 8), kNextLane = fold_powers(kLane * 8),
                     kNextQuarter = fold_powers(128);

KV_FOLDS inline __m512i fold(__m512i lane, __m512i by, __m512i next) {
  const __m512i low = _mm512_clmulepi64_epi128(lane, by, 0x00);
  const __m512i high = _mm512_clmulepi64_epi128(lane, by, 0x11);
  return _mm512_ternarylogic_epi64(low, high, next, 0x96);  // the exclusive or of the three
}
KV_FOLDS inline __m128i fold(__m128i quarter, __m128i by, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(quarter, by, 0x00);
  const __m128i high = _mm_clmulepi64_si128(quarter, by, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}
KV_FOLDS inline __m512i wide(const FoldPowers& by) {
  return _mm512_broadcast_i32x4(
      _mm_set_epi64x(static_cast<int64_t>(by.high), static_cast<int64_t>(by.low)));
}

// One lane, and with kCopy also to where it is copied: the CRC is of the very bits that are written.
template <bool kCopy>
KV_FOLDS inline __m512i take(const uint8_t* from, [[maybe_unused]] uint8_t* to) {
  const __m512i lane = _mm512_loadu_si512(from);
  if constexpr (kCopy) _mm512_storeu_si512(to, lane);
  return lane;
}

KV_FOLDS uint32_t crc_of(__m512i lane) {
  const __m128i by = _mm512_castsi512_si128(wide(kNextQuarter));
  __m128i sum = _mm512_castsi512_si128(lane);
  sum = fold(sum, by, _mm512_extracti32x4_epi32(lane, 1));
  sum = fold(sum, by, _mm512_extracti32x4_epi32(lane, 2));
  sum = fold(sum, by, _mm512_extracti32x4_epi32(lane, 3));
  const uint64_t crc = _mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(sum)));
  return static_cast<uint32_t>(
      _mm_crc32_u64(crc, static_cast<uint64_t>(_mm_extract_epi64(sum, 1))));
}

template <bool kCopy>
KV_FOLDS uint32_t fold_all(const uint8_t* from, uint8_t* to, size_t size, uint32_t crc) {
  __m512i sums[kLanes];
  for (size_t k = 0; k < kLanes; ++k) sums[k] = take<kCopy>(from + k * kLane, to + k * kLane);
  sums[0] = _mm512_xor_si512(
      sums[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(~crc))));
  const __m512i by = wide(kRound);
  for (size_t at = kLanes * kLane; at < size; at += kLanes * kLane)
    for (size_t k = 0; k < kLanes; ++k)
      sums[k] = fold(sums[k], by, take<kCopy>(from + at + k * kLane, to + at + k * kLane));
  __m512i sum = sums[0];
  for (size_t k = 1; k < kLanes; ++k) sum = fold(sum, wide(kNextLane), sums[k]);
  return ~crc_of(sum);
}

}  // namespace

uint32_t fold_crc32c(const uint8_t* data, size_t size, uint32_t crc) {
  return fold_all<false>(data, const_cast<uint8_t*>(data), size, crc);  // not written
}
uint32_t fold_copy_crc32c(uint8_t* to, const uint8_t* from, size_t size, uint32_t crc) {
  return fold_all<true>(from, to, size, crc);
}

}  // namespace kv
#endif
