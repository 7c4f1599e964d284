#include "memory/placement.h"

namespace kv {

std::vector<PoolRegion> divide_pool(uint64_t bytes, uint64_t alignment,
                                    const std::vector<uint32_t>& numa_nodes) {
  std::vector<PoolRegion> regions;
  const uint64_t units = bytes / alignment, count = numa_nodes.size();
  if (count == 0 || units < count) return regions;
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t begin = units * i / count * alignment;
    const uint64_t end = i + 1 == count ? bytes : units * (i + 1) / count * alignment;
    regions.push_back({numa_nodes[i], begin, end - begin});
  }
  return regions;
}

}  // namespace kv
