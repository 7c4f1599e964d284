#include "digest/crc32c.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

#include "base/processor.h"
#include "digest/crc32c_fold.h"
#include "digest/crc32c_polynomial.h"

namespace kv {
namespace {

// Bytes per stream of a three-way round. The longest are for bytes outside of the caches, which
// memory delivers at its full rate only in long runs; three of kMiddle are just below 64 KiB.
constexpr size_t kLongest = 64u << 10;
constexpr size_t kMiddle = 20u << 10;
constexpr size_t kLong = 4096;
constexpr size_t kShort = 256;
using ByteTables = std::array<std::array<uint32_t, 256>, 8>;

constexpr ByteTables make_byte_tables() {
  ByteTables tables{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (kCrc32cPolynomial & (0u - (crc & 1)));
    tables[0][i] = crc;
  }
  for (size_t k = 1; k < 8; ++k)
    for (size_t i = 0; i < 256; ++i)
      tables[k][i] = (tables[k - 1][i] >> 8) ^ tables[0][tables[k - 1][i] & 0xFF];
  return tables;
}

constexpr ByteTables kByteTables = make_byte_tables();

uint64_t load64(const uint8_t* at) {
  uint64_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

#if defined(__x86_64__)
#define KV_CRC32_INSTRUCTION __attribute__((target("sse4.2")))
KV_CRC32_INSTRUCTION inline uint64_t crc_64(uint64_t crc, uint64_t word) {
  return _mm_crc32_u64(crc, word);
}
KV_CRC32_INSTRUCTION inline uint32_t crc_8(uint32_t crc, uint8_t byte) {
  return _mm_crc32_u8(crc, byte);
}
#elif defined(__aarch64__)
#define KV_CRC32_INSTRUCTION __attribute__((target("+crc")))
KV_CRC32_INSTRUCTION inline uint64_t crc_64(uint64_t crc, uint64_t word) {
  return __crc32cd(static_cast<uint32_t>(crc), word);
}
KV_CRC32_INSTRUCTION inline uint32_t crc_8(uint32_t crc, uint8_t byte) {
  return __crc32cb(crc, byte);
}
#endif

#if defined(KV_CRC32_INSTRUCTION)
constexpr ShiftTables kShiftLongest = make_shift_tables(kLongest);
constexpr ShiftTables kShiftMiddle = make_shift_tables(kMiddle);
constexpr ShiftTables kShiftLong = make_shift_tables(kLong);
constexpr ShiftTables kShiftShort = make_shift_tables(kShort);

// The instruction takes three cycles and starts one per cycle: three streams keep it busy.
template <size_t kStream>
KV_CRC32_INSTRUCTION uint64_t three_way(const uint8_t* at, uint64_t crc,
                                        const ShiftTables& tables) {
  uint64_t second = 0, third = 0;
  for (size_t i = 0; i < kStream; i += 8) {
    crc = crc_64(crc, load64(at + i));
    second = crc_64(second, load64(at + kStream + i));
    third = crc_64(third, load64(at + 2 * kStream + i));
  }
  return shift(tables, shift(tables, crc) ^ second) ^ third;
}

// As many whole rounds as there are.
template <size_t kStream>
uint64_t rounds(const uint8_t*& at, size_t& size, uint64_t crc, const ShiftTables& tables) {
  for (; size >= 3 * kStream; at += 3 * kStream, size -= 3 * kStream)
    crc = three_way<kStream>(at, crc, tables);
  return crc;
}

KV_CRC32_INSTRUCTION uint32_t crc32c_instruction(const void* data, size_t size, uint32_t init) {
  const auto* at = static_cast<const uint8_t*>(data);
  uint64_t crc = static_cast<uint32_t>(~init);
  crc = rounds<kLongest>(at, size, crc, kShiftLongest);
  crc = rounds<kMiddle>(at, size, crc, kShiftMiddle);
  crc = rounds<kLong>(at, size, crc, kShiftLong);
  crc = rounds<kShort>(at, size, crc, kShiftShort);
  for (; size >= 8; at += 8, size -= 8) crc = crc_64(crc, load64(at));
  auto tail = static_cast<uint32_t>(crc);
  for (; size != 0; ++at, --size) tail = crc_8(tail, *at);
  return ~tail;
}

KV_CRC32_INSTRUCTION inline uint64_t copy_16(uint8_t* to, const uint8_t* at, uint64_t crc) {
#if defined(__x86_64__)
  const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), words);
  crc = crc_64(crc, static_cast<uint64_t>(_mm_cvtsi128_si64(words)));
  return crc_64(crc, static_cast<uint64_t>(_mm_extract_epi64(words, 1)));
#else
  const std::array<uint64_t, 2> words{load64(at), load64(at + 8)};
  std::memcpy(to, words.data(), sizeof words);
  return crc_64(crc_64(crc, words[0]), words[1]);
#endif
}

// three_way that also stores what it reads: beside the memory accesses the CRC costs almost
// nothing, and it is of the very registers that are written.
template <size_t kStream>
KV_CRC32_INSTRUCTION uint64_t copy_three_way(uint8_t* to, const uint8_t* at, uint64_t crc,
                                             const ShiftTables& tables) {
  uint64_t second = 0, third = 0;
  for (size_t i = 0; i < kStream; i += 16) {
    crc = copy_16(to + i, at + i, crc);
    second = copy_16(to + kStream + i, at + kStream + i, second);
    third = copy_16(to + 2 * kStream + i, at + 2 * kStream + i, third);
  }
  return shift(tables, shift(tables, crc) ^ second) ^ third;
}

uint32_t copy_instruction(uint8_t* to, const uint8_t* at, size_t size, uint32_t init) {
  uint64_t crc = static_cast<uint32_t>(~init);
  for (; size >= 3 * kLong; at += 3 * kLong, to += 3 * kLong, size -= 3 * kLong)
    crc = copy_three_way<kLong>(to, at, crc, kShiftLong);
  for (; size >= 3 * kShort; at += 3 * kShort, to += 3 * kShort, size -= 3 * kShort)
    crc = copy_three_way<kShort>(to, at, crc, kShiftShort);
  if (size != 0) std::memcpy(to, at, size);
  return crc32c_instruction(to, size, ~static_cast<uint32_t>(crc));
}
#endif

uint32_t crc32c_portable(const void* data, size_t size, uint32_t init) {
  const auto* at = static_cast<const uint8_t*>(data);
  uint32_t crc = ~init;
  for (; size >= 8; at += 8, size -= 8) {
    const uint64_t word = load64(at) ^ crc;
    crc = 0;
    for (size_t k = 0; k < 8; ++k) crc ^= kByteTables[7 - k][(word >> (8 * k)) & 0xFF];
  }
  for (; size != 0; ++at, --size) crc = (crc >> 8) ^ kByteTables[0][(crc ^ *at) & 0xFF];
  return ~crc;
}

uint32_t copy_portable(uint8_t* to, const uint8_t* at, size_t size, uint32_t crc) {
  constexpr size_t kChunk = 8192;  // in the L1 cache between memcpy and the CRC of what it wrote
  for (; size != 0; at += kChunk, to += kChunk) {
    const size_t bytes = std::min(size, kChunk);
    std::memcpy(to, at, bytes);
    crc = crc32c_portable(to, bytes, crc);
    size -= bytes;
  }
  return crc;
}

#if defined(__x86_64__)
// Whole rounds are folded; the rest is for the CRC32 instruction.
uint32_t crc32c_folded(const void* data, size_t size, uint32_t crc) {
  const size_t folded = fold_rounds(size);
  const auto* at = static_cast<const uint8_t*>(data);
  if (folded != 0) crc = fold_crc32c(at, folded, crc);
  return crc32c_instruction(at + folded, size - folded, crc);
}
uint32_t crc32c_paired(const void* data, size_t size, uint32_t crc) {
  const auto* at = static_cast<const uint8_t*>(data);
  for (; size >= kPairedBytes; at += kPairedBytes, size -= kPairedBytes)
    crc = paired_crc32c(at, crc);
  return crc32c_instruction(at, size, crc);
}
uint32_t copy_folded(uint8_t* to, const uint8_t* at, size_t size, uint32_t crc) {
  const size_t folded = fold_rounds(size);
  if (folded != 0) crc = fold_copy_crc32c(to, at, folded, crc);
  return copy_instruction(to + folded, at + folded, size - folded, crc);
}
#endif

std::vector<Crc32cBackend> usable() {
  std::vector<Crc32cBackend> backends;
#if defined(__x86_64__)
  const Processor has = processor();
  const bool multiplies = has.sse42 && has.pclmul && has.vpclmulqdq;
  if (multiplies && has.avx512f) backends.push_back({"vpclmulqdq", crc32c_folded, copy_folded});
  if (multiplies && has.avx2)
    backends.push_back({"vpclmulqdq and sse4.2", crc32c_paired, copy_instruction});
  if (has.sse42) backends.push_back({"sse4.2", crc32c_instruction, copy_instruction});
#elif defined(__aarch64__)
  if ((getauxval(AT_HWCAP) & HWCAP_CRC32) != 0)
    backends.push_back({"crc32", crc32c_instruction, copy_instruction});
#endif
  backends.push_back({"portable", crc32c_portable, copy_portable});
  return backends;
}

const std::vector<Crc32cBackend> kBackends = usable();
const Crc32cBackend kBackend = kBackends.front();

}  // namespace

uint32_t crc32c(const void* data, size_t size, uint32_t crc) {
  return kBackend.crc(data, size, crc);
}

uint32_t copy_crc32c(void* dst, const void* src, size_t size, uint32_t crc) {
  return kBackend.copy(static_cast<uint8_t*>(dst), static_cast<const uint8_t*>(src), size, crc);
}

const std::vector<Crc32cBackend>& crc32c_backends() { return kBackends; }

}  // namespace kv
