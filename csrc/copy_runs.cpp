#include "copy_runs.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace kv {
namespace {

constexpr uint64_t kStreamedBytes = 4u << 20;  // what is longer than this pushes others from a cache
constexpr uint64_t kStreamedRun = 64;
#if defined(__x86_64__)
constexpr uint64_t kAhead = 2048, kFirst = 256;
#endif

// Runs of a size known to the compiler: a few moves each, no call.
template <uint64_t kBytes>
void copy_fixed(uint8_t* to, const uint8_t* from, uint64_t count, uint64_t to_stride,
                uint64_t from_stride) {
  for (uint64_t i = 0; i < count; ++i, to += to_stride, from += from_stride)
    std::memcpy(to, from, kBytes);
}

#if defined(__x86_64__)
void stream_line(uint8_t* to, const uint8_t* from) {
  const auto* words = reinterpret_cast<const __m128i*>(from);
  const __m128i a = _mm_loadu_si128(words), b = _mm_loadu_si128(words + 1),
                c = _mm_loadu_si128(words + 2), d = _mm_loadu_si128(words + 3);
  auto* line = reinterpret_cast<__m128i*>(to);
  _mm_stream_si128(line, a);
  _mm_stream_si128(line + 1, b);
  _mm_stream_si128(line + 2, c);
  _mm_stream_si128(line + 3, d);
}

void stream(uint8_t* to, const uint8_t* from, uint64_t bytes) {
  const uint64_t head = std::min(-reinterpret_cast<uintptr_t>(to) & 15, bytes);
  if (head != 0) std::memcpy(to, from, head);
  to += head, from += head, bytes -= head;
  for (; bytes >= 64; to += 64, from += 64, bytes -= 64) stream_line(to, from);
  for (; bytes >= 16; to += 16, from += 16, bytes -= 16)
    _mm_stream_si128(reinterpret_cast<__m128i*>(to),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  if (bytes != 0) std::memcpy(to, from, bytes);
}

// The processor's own prefetching ends with a page, and so with most runs: the beginning of a run
// that comes later is fetched by hand.
void stream_runs(uint8_t* to, const uint8_t* from, uint64_t bytes, uint64_t count,
                 uint64_t to_stride, uint64_t from_stride) {
  const uint64_t ahead = std::max<uint64_t>(1, kAhead / bytes), first = std::min(bytes, kFirst);
  for (uint64_t i = 0; i < count; ++i, to += to_stride, from += from_stride) {
    if (i + ahead < count)
      for (uint64_t at = 0; at < first; at += 64)
        _mm_prefetch(reinterpret_cast<const char*>(from + ahead * from_stride + at), _MM_HINT_T0);
    stream(to, from, bytes);
  }
}
#endif

}  // namespace

RunCopy::RunCopy(uint64_t total_bytes, uint64_t least_run_bytes)
    : streams_(total_bytes >= kStreamedBytes && least_run_bytes >= kStreamedRun) {}

RunCopy::~RunCopy() {
#if defined(__x86_64__)
  if (streams_) _mm_sfence();
#endif
}

void RunCopy::operator()(uint8_t* to, const uint8_t* from, uint64_t bytes, uint64_t count,
                         uint64_t to_stride, uint64_t from_stride) const {
#if defined(__x86_64__)
  if (streams_) return stream_runs(to, from, bytes, count, to_stride, from_stride);
#endif
  switch (bytes) {
    case 1: return copy_fixed<1>(to, from, count, to_stride, from_stride);
    case 2: return copy_fixed<2>(to, from, count, to_stride, from_stride);
    case 4: return copy_fixed<4>(to, from, count, to_stride, from_stride);
    case 8: return copy_fixed<8>(to, from, count, to_stride, from_stride);
    case 16: return copy_fixed<16>(to, from, count, to_stride, from_stride);
    case 32: return copy_fixed<32>(to, from, count, to_stride, from_stride);
    case 64: return copy_fixed<64>(to, from, count, to_stride, from_stride);
    case 128: return copy_fixed<128>(to, from, count, to_stride, from_stride);
    case 256: return copy_fixed<256>(to, from, count, to_stride, from_stride);
    default: break;
  }
  for (uint64_t i = 0; i < count; ++i)
    std::memcpy(to + i * to_stride, from + i * from_stride, bytes);
}

}  // namespace kv
