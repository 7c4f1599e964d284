// Random 64-bit numbers, from the operating system.
#pragma once

#include <cstdint>
#include <random>

namespace kv {

inline uint64_t random_u64() {
  std::random_device random;
  return (uint64_t{random()} << 32) | random();
}
// Never 0.
inline uint64_t random_id() { return random_u64() | 1; }

}  // namespace kv
