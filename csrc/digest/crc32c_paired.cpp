// Carry-less multiplications and the CRC32 instruction run on different units of a core: one part of a
// round is folded (as in digest/crc32c_fold.cpp, in lanes of 256 bits) while three others go the other way.
#include "digest/crc32c_paired.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "digest/crc32c_polynomial.h"

#define KV_PAIRS __attribute__((target("avx2,vpclmulqdq,pclmul,sse4.2")))

namespace kv {
namespace {

constexpr size_t kLane = 32, kLanes = 4, kWords = 6;  // of each step: as much as both units take
constexpr size_t kStream = kPairedSteps * kWords * 8;
static_assert(kPairedBytes == kPairedSteps * kLanes * kLane + 3 * kStream);

constexpr FoldPowers kRound = fold_powers(kLanes * kLane * 8), kNextLane = fold_powers(kLane * 8),
                     kNextHalf = fold_powers(128);
constexpr ShiftTables kShift = make_shift_tables(kStream);

KV_PAIRS inline __m256i fold(__m256i lane, __m256i by, __m256i next) {
  const __m256i low = _mm256_clmulepi64_epi128(lane, by, 0x00);
  const __m256i high = _mm256_clmulepi64_epi128(lane, by, 0x11);
  return _mm256_xor_si256(_mm256_xor_si256(low, high), next);
}
KV_PAIRS inline __m256i wide(const FoldPowers& by) {
  return _mm256_set_epi64x(static_cast<int64_t>(by.high), static_cast<int64_t>(by.low),
                           static_cast<int64_t>(by.high), static_cast<int64_t>(by.low));
}
KV_PAIRS inline __m256i lane_at(const uint8_t* at) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
}

KV_PAIRS uint64_t crc_of(__m256i lane) {
  const __m256i half = _mm256_zextsi128_si256(_mm256_castsi256_si128(lane));
  const __m256i next = _mm256_zextsi128_si256(_mm256_extracti128_si256(lane, 1));
  const __m128i sum = _mm256_castsi256_si128(fold(half, wide(kNextHalf), next));
  const uint64_t crc = _mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(sum)));
  return _mm_crc32_u64(crc, static_cast<uint64_t>(_mm_extract_epi64(sum, 1)));
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

KV_PAIRS uint32_t paired_crc32c(const uint8_t* data, uint32_t crc) {
  const uint8_t* folded = data;
  const uint8_t* stream = data + kPairedSteps * kLanes * kLane;
  uint64_t crcs[3] = {};
  // What came before is worth the same as if the first lane began with it.
  __m256i sums[kLanes] = {_mm256_zextsi128_si256(_mm_cvtsi32_si128(static_cast<int>(~crc)))};
  for (size_t k = 0; k < kLanes; ++k) sums[k] = _mm256_xor_si256(sums[k], lane_at(folded + k * kLane));
  for (size_t k = 0; k < 3; ++k) crcs[k] = step(0, stream + k * kStream);
  const __m256i by = wide(kRound);
  for (size_t left = kPairedSteps - 1; left != 0; --left) {
    folded += kLanes * kLane, stream += kWords * 8;
    for (size_t k = 0; k < kLanes; ++k) sums[k] = fold(sums[k], by, lane_at(folded + k * kLane));
    for (size_t k = 0; k < 3; ++k) crcs[k] = step(crcs[k], stream + k * kStream);
  }
  __m256i sum = sums[0];
  for (size_t k = 1; k < kLanes; ++k) sum = fold(sum, wide(kNextLane), sums[k]);
  uint64_t all = crc_of(sum);
  for (const uint64_t next : crcs) all = shift(kShift, all) ^ next;
  return ~static_cast<uint32_t>(all);
}

}  // namespace kv
#endif
