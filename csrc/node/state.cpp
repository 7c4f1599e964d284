#include "node/state.h"

namespace kv {
namespace {

std::vector<uint64_t> begins_of(const std::vector<PoolRegion>& regions) {
  std::vector<uint64_t> begins;
  for (const PoolRegion& region : regions) begins.push_back(region.begin);
  return begins;
}

}  // namespace

NodeState::NodeState(NodeOptions given, uint8_t* memory, uint64_t bytes)
    : options(std::move(given)), pool(memory), tenant_counts(options.tenants.count() + 1),
      slab(bytes, options.granule_bytes, begins_of(options.regions)),
      holds(slab, options.reserve_bytes.value_or(bytes / kReserveShare)),
      table(slab, Quotas(options.eviction, bytes, options.tenants.quotas(), options.limits.pins)),
      registry(options.tenants.count()) {}

}  // namespace kv
