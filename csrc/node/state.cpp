#include "node/state.h"

namespace kv {
namespace {

Quotas quotas_of(const NodeOptions& options, uint64_t pool_bytes) {
  const auto make = [name = options.eviction] { return make_eviction_policy(name); };
  if (options.tenants.open()) return Quotas(make());
  return {pool_bytes, options.tenants.quotas(), make, options.limits.pins};
}

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
      table(slab, quotas_of(options, bytes)), registry(options.tenants.count()) {}

}  // namespace kv
