// What cannot go, counted where tenants have limits: what is pinned or being written, and all that
// comes before it in its chain.
#include "table/table.h"

namespace kv {

uint64_t Table::bytes_of(const std::vector<Part>& parts) const {
  uint64_t bytes = 0;
  for (const Part& part : parts) bytes += slab_.rounded(part.slot.bytes);
  return bytes;
}

// A chain belongs to one tenant, since its blocks have one spec.
void Table::count_held(const Block& block, int64_t more_bytes) {
  if (more_bytes > 0) quotas_.hold(block.tenant, static_cast<uint64_t>(more_bytes));
  if (more_bytes < 0) quotas_.let_go(block.tenant, static_cast<uint64_t>(-more_bytes));
}

void Table::settle_hold(Block& block) {
  if (!quotas_.limited()) return;
  const bool holds = block.resident && (block.pins != 0 || block.reserved != 0);
  if (std::exchange(block.holds, holds) == holds) return;
  count_held(block, holds ? forest_.hold(*block.place) : forest_.let_go(*block.place));
}

// The block has so many bytes more; modulo 2^64.
void Table::grow(Block& block, uint64_t bytes) {
  if (quotas_.limited() && bytes != 0) count_held(block, forest_.grow(*block.place, bytes));
}

}  // namespace kv
