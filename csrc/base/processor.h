// The instructions that this processor and the kernel support, by CPUID: __builtin_cpu_supports is
// always 0 if the compiler's runtime (as zig's) does not fill its table.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>

namespace kv {

struct Processor {
  bool sse42 = false, pclmul = false;
  bool avx2 = false, vpclmulqdq = false;      // registers of 256 bits
  bool avx512f = false, avx512vbmi2 = false;  // of 512 bits; VBMI2 here includes BW, DQ and VL
};

inline Processor processor() {
  unsigned a, b, c, d, kept;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return {};
  Processor has{.sse42 = (c & bit_SSE4_2) != 0, .pclmul = (c & bit_PCLMUL) != 0};
  if ((c & bit_OSXSAVE) == 0 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return has;
  __asm__("xgetbv" : "=a"(kept), "=d"(d) : "c"(0));  // registers that the kernel saves
  const bool wide = (kept & 0x06) == 0x06, widest = wide && (kept & 0xE0) == 0xE0;
  constexpr unsigned kSubsets = bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
  has.avx2 = wide && (b & bit_AVX2) != 0;
  has.vpclmulqdq = wide && (c & bit_VPCLMULQDQ) != 0;
  has.avx512f = widest && (b & bit_AVX512F) != 0;
  has.avx512vbmi2 = has.avx512f && (b & kSubsets) == kSubsets && (c & bit_AVX512VBMI2) != 0;
  return has;
}

}  // namespace kv
#endif
