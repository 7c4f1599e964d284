// Which memory a pool is to be made of.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kv {

// Pages of a pool: the system's own; huge ones that the kernel assembles (THP); huge ones that the
// host has reserved (hugetlbfs).
enum class Pages : uint8_t { kSmall, kTransparent, kExplicit };
inline constexpr std::array<const char*, 3> kPagesNames{"small", "transparent", "explicit"};

// What is wanted. A size of 0: not those pages.
struct Placement {
  size_t explicit_page_bytes = 0;      // tried first
  bool explicit_only = false;          // no other pages
  size_t transparent_page_bytes = 0;   // tried next
  bool transparent_by_touch = true;    // the kernel gives those at the first touch; else only a
                                       // prefaulted pool can get them, by MADV_COLLAPSE
  std::vector<uint32_t> numa_nodes{};  // one region of the pool for each; empty: not bound
};

// A part of the pool whose memory belongs to a NUMA node.
struct PoolRegion {
  uint32_t numa_node = 0;
  uint64_t begin = 0;  // in the pool, bytes
  uint64_t bytes = 0;
};

// Divides `bytes` evenly; regions begin at multiples of `alignment`. Empty without nodes, or if the
// pool is too small to be divided.
std::vector<PoolRegion> divide_pool(uint64_t bytes, uint64_t alignment,
                                    const std::vector<uint32_t>& numa_nodes);

}  // namespace kv
