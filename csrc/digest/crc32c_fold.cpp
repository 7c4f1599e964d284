// V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction"
// (Intel, 2009), in lanes of 512 or 256 bits: a lane that is n bits ahead of another counts times
// x^n, and adding that product, modulo the polynomial, to the other leaves the CRC of both
// unchanged. Both halves of each 128 bits are multiplied, each with its own power.
#include "digest/crc32c_fold.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "digest/crc32c_polynomial.h"

// GCC reports the undefined operands of its own intrinsics as mistakes (bug 105593).
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#define KV_FOLDS __attribute__((target("avx512f,vpclmulqdq,pclmul,sse4.2")))
#define KV_PAIRS __attribute__((target("avx2,vpclmulqdq,pclmul,sse4.2")))

namespace kv {
namespace {

constexpr size_t kLanes = 4;
constexpr size_t kWide = 64, kNarrow = 32;  // bytes of a lane
constexpr size_t kWords =
    6;  // of each step that goes to the CRC32 instruction: as much as it takes
constexpr size_t kStream = kPairedSteps * kWords * 8;
static_assert(kPairedBytes == kPairedSteps * kLanes * kNarrow + 3 * kStream);

constexpr FoldPowers kNextQuarter = fold_powers(128);
constexpr ShiftTables kShift = make_shift_tables(kStream);

KV_FOLDS inline __m512i fold(__m512i lane, __m512i by, __m512i next) {
  const __m512i low = _mm512_clmulepi64_epi128(lane, by, 0x00);
  const __m512i high = _mm512_clmulepi64_epi128(lane, by, 0x11);
  return _mm512_ternarylogic_epi64(low, high, next, 0x96);  // the exclusive or of the three
}
KV_PAIRS inline __m256i fold(__m256i lane, __m256i by, __m256i next) {
  const __m256i low = _mm256_clmulepi64_epi128(lane, by, 0x00);
  const __m256i high = _mm256_clmulepi64_epi128(lane, by, 0x11);
  return _mm256_xor_si256(_mm256_xor_si256(low, high), next);
}
KV_PAIRS inline __m128i fold(__m128i quarter, __m128i by, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(quarter, by, 0x00);
  const __m128i high = _mm_clmulepi64_si128(quarter, by, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}
KV_PAIRS inline __m128i powers(const FoldPowers& by) {
  return _mm_set_epi64x(static_cast<int64_t>(by.high), static_cast<int64_t>(by.low));
}
KV_FOLDS inline __m512i wide(const FoldPowers& by) { return _mm512_broadcast_i32x4(powers(by)); }
KV_PAIRS inline __m256i narrow(const FoldPowers& by) {
  return _mm256_broadcastsi128_si256(powers(by));
}
KV_PAIRS inline uint64_t crc_of(__m128i sum) {
  const uint64_t crc = _mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(sum)));
  return _mm_crc32_u64(crc, static_cast<uint64_t>(_mm_extract_epi64(sum, 1)));
}

// One lane; with kCopy also to where it is copied: the CRC is of the very bits that are written.
template <bool kCopy>
KV_FOLDS inline __m512i take(const uint8_t* from, [[maybe_unused]] uint8_t* to) {
  const __m512i lane = _mm512_loadu_si512(from);
  if constexpr (kCopy) _mm512_storeu_si512(to, lane);
  return lane;
}

template <bool kCopy>
KV_FOLDS uint32_t fold_all(const uint8_t* from, uint8_t* to, size_t size, uint32_t crc) {
  __m512i sums[kLanes];
  for (size_t k = 0; k < kLanes; ++k) sums[k] = take<kCopy>(from + k * kWide, to + k * kWide);
  sums[0] =
      _mm512_xor_si512(sums[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(~crc))));
  static constexpr FoldPowers kRound = fold_powers(kLanes * kWide * 8);
  static constexpr FoldPowers kNextLane = fold_powers(kWide * 8);
  const __m512i by = wide(kRound);
  for (size_t at = kLanes * kWide; at < size; at += kLanes * kWide)
    for (size_t k = 0; k < kLanes; ++k)
      sums[k] = fold(sums[k], by, take<kCopy>(from + at + k * kWide, to + at + k * kWide));
  __m512i sum = sums[0];
  for (size_t k = 1; k < kLanes; ++k) sum = fold(sum, wide(kNextLane), sums[k]);
  const __m128i next = powers(kNextQuarter);
  __m128i last = _mm512_castsi512_si128(sum);
  last = fold(last, next, _mm512_extracti32x4_epi32(sum, 1));
  last = fold(last, next, _mm512_extracti32x4_epi32(sum, 2));
  last = fold(last, next, _mm512_extracti32x4_epi32(sum, 3));
  return ~static_cast<uint32_t>(crc_of(last));
}

KV_PAIRS inline __m256i lane_at(const uint8_t* at) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
}

KV_PAIRS inline uint64_t step(uint64_t crc, const uint8_t* at) {
  for (size_t k = 0; k < kWords; ++k) {
    uint64_t word;
    std::memcpy(&word, at + 8 * k, sizeof word);
    crc = _mm_crc32_u64(crc, word);
  }
  return crc;
}

}  // namespace

uint32_t fold_crc32c(const uint8_t* data, size_t size, uint32_t crc) {
  return fold_all<false>(data, const_cast<uint8_t*>(data), size, crc);  // not written
}
uint32_t fold_copy_crc32c(uint8_t* to, const uint8_t* from, size_t size, uint32_t crc) {
  return fold_all<true>(from, to, size, crc);
}

// The first part of the round is folded, the other three go to the CRC32 instruction.
KV_PAIRS uint32_t paired_crc32c(const uint8_t* data, uint32_t crc) {
  const uint8_t* folded = data;
  const uint8_t* stream = data + kPairedSteps * kLanes * kNarrow;
  uint64_t crcs[3] = {};
  // The CRC so far counts as if the first lane began with it.
  __m256i sums[kLanes] = {_mm256_zextsi128_si256(_mm_cvtsi32_si128(static_cast<int>(~crc)))};
  for (size_t k = 0; k < kLanes; ++k)
    sums[k] = _mm256_xor_si256(sums[k], lane_at(folded + k * kNarrow));
  for (size_t k = 0; k < 3; ++k) crcs[k] = step(0, stream + k * kStream);
  static constexpr FoldPowers kRound = fold_powers(kLanes * kNarrow * 8);
  static constexpr FoldPowers kNextLane = fold_powers(kNarrow * 8);
  const __m256i by = narrow(kRound);
  for (size_t left = kPairedSteps - 1; left != 0; --left) {
    folded += kLanes * kNarrow, stream += kWords * 8;
    for (size_t k = 0; k < kLanes; ++k) sums[k] = fold(sums[k], by, lane_at(folded + k * kNarrow));
    for (size_t k = 0; k < 3; ++k) crcs[k] = step(crcs[k], stream + k * kStream);
  }
  __m256i sum = sums[0];
  for (size_t k = 1; k < kLanes; ++k) sum = fold(sum, narrow(kNextLane), sums[k]);
  uint64_t all = crc_of(
      fold(_mm256_castsi256_si128(sum), powers(kNextQuarter), _mm256_extracti128_si256(sum, 1)));
  for (const uint64_t next : crcs) all = shift(kShift, all) ^ next;
  return ~static_cast<uint32_t>(all);
}

}  // namespace kv
#endif
