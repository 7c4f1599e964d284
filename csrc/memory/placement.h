// Where a pool's memory is to come from, and where it came from.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kv {

// What a pool can be made of: the system's own pages; huge ones that the kernel puts together
// itself (THP); huge ones that the host has set aside (hugetlbfs).
enum class Pages : uint8_t { kSmall, kTransparent, kExplicit };
inline constexpr std::array<const char*, 3> kPagesNames{"small", "transparent", "explicit"};

// What is wanted. Whoever fills it in has looked at the host; a size of 0 is "not those".
struct Placement {
  size_t explicit_page_bytes = 0;     // tried first
  bool explicit_only = false;         // no other pages will do
  size_t transparent_page_bytes = 0;  // tried next
  bool transparent_by_touch = true;   // the host gives those to who touches the pool first; else they
                                      // have to be asked for, which takes a pool that is prefaulted
  std::vector<uint32_t> numa_nodes{};  // one region of the pool for each; none: it is bound to none
};

// A part of the pool whose memory belongs to a NUMA node.
struct PoolRegion {
  uint32_t numa_node = 0;
  uint64_t begin = 0;  // in the pool, bytes
  uint64_t bytes = 0;
};

// Divides `bytes` evenly, each region beginning at a multiple of `alignment`. Empty without nodes,
// and where the pool is too small to be divided.
std::vector<PoolRegion> divide_pool(uint64_t bytes, uint64_t alignment,
                                    const std::vector<uint32_t>& numa_nodes);

}  // namespace kv
