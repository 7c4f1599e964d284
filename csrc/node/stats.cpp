// Gauges and counters of a node. kvrouter_store/node/metrics.py reads their names.
#include "node/node.h"

namespace kv {
namespace {

// By node of the host; "any" is all of a pool that is bound to none.
void add_numa_nodes(StatList& list, const Slab& slab, const std::vector<PoolRegion>& regions) {
  const uint64_t used = slab.pool_bytes() - slab.free_bytes();
  list.add("numa_used_bytes", used);
  if (regions.empty()) list.add("numa_used_bytes.any", used);
  for (size_t i = 0; i < regions.size(); ++i)
    list.add("numa_used_bytes." + std::to_string(regions[i].numa_node),
             slab.regions() == 0 ? used : slab.used_bytes_of(i));
}

// Each series, by the name of its tenant.
void add_tenant(StatList& list, const std::string& name, const TenantUse& use,
                const TenantCounts& counts, uint64_t quota_bytes) {
  list.add("tenant_used_bytes." + name, use.used_bytes)
      .add("tenant_held_bytes." + name, use.held_bytes)
      .add("tenant_blocks." + name, use.blocks)
      .add("tenant_connections." + name, counts.connections)
      .add("tenant_evictions_total." + name, use.evictions)
      .add("tenant_hits_total." + name, counts.hits)
      .add("tenant_misses_total." + name, counts.misses)
      .add("tenant_limited_total." + name, counts.limited);
  if (quota_bytes != 0) list.add("tenant_quota_bytes." + name, quota_bytes);
}

}  // namespace

StatList::Values Node::stats(std::optional<uint32_t> tenant) const {
  const TableCounts& table = state_.table.counts();
  const Counters& c = state_.counters;
  const Slab& slab = state_.slab;
  CountsBy<Transport, kTransportNames.size()> connections;
  uint64_t fenced_blocks = state_.fences.slots(), fenced_bytes = state_.fences.bytes();
  for (const auto& [id, session] : state_.sessions) {
    ++connections[session->transport()];
    fenced_blocks += session->expired.size();
    for (const auto& [generation, one] : session->expired) fenced_bytes += one.slot.bytes;
  }
  CountsBy<Pages, kPagesNames.size()> page_bytes;
  page_bytes[state_.options.pages] = state_.options.page_bytes;
  StatList list;
  list.add("pool_bytes", slab.pool_bytes())
      .add("free_bytes", slab.free_bytes())
      .add("used_bytes", slab.pool_bytes() - slab.free_bytes() - local_.lent_bytes())
      .add_each("page_bytes", kPagesNames, page_bytes.values);
  add_numa_nodes(list, slab, state_.options.regions);
  list.add("blocks", state_.table.blocks())
      .add("reserved_blocks", table.reserved_blocks)
      .add("lent_bytes", local_.lent_bytes())
      .add("fenced_blocks", fenced_blocks)
      .add("fenced_bytes", fenced_bytes)
      .add("pinned_blocks", table.pinned_blocks)
      .add("leases", state_.leases.size() + local_.leases())
      .add("leased_blocks", state_.leases.blocks() + local_.leased_blocks())
      .add("waits", landings_.size())
      .add_each("connections", kTransportNames, connections.values)
      .add("queue_pairs", attachments_.size())
      .add("draining", state_.draining ? 1 : 0)
      .add("tiered", tier_asks_.offered() ? 1 : 0)
      .add("manifests", state_.registry.manifests().size())
      .add("connections_total", c.connections)
      .add_each("hits_total", kTierNames, c.hits.values)
      .add_each("misses_total", kTierNames, c.misses.values)
      .add("puts_total", c.puts)
      .add("commits_total", c.commits)
      .add_each("posts_total", kPostedNames, c.posts.values)
      .add("aborts_total", c.aborts)
      .add_each("evictions_total", std::array<const char*, 3>{"capacity", "deleted", "purged"},
                {table.evictions, c.deleted, c.purged})
      .add("no_space_total", c.no_space)
      .add("corrupt_total", c.corrupt)
      .add("fenced_total", c.fenced)
      .add("expired_reservations_total", c.expired)
      .add("client_limited_total", c.client_limited)
      .add_each("bytes_in_total", kTransportNames, c.bytes_in.values)
      .add_each("bytes_out_total", kTransportNames, c.bytes_out.values)
      .add_each("attaches_total", kAttachedNames, c.attaches.values)
      .add("broken_attachments_total", c.broken_attachments)
      .add("refusals_total", c.refusals)
      .add_each("landings_total", kLandingNames, c.landings.values)
      .add("bad_frames_total", c.bad_frames)
      .add("unauthorized_total", c.unauthorized)
      .add("tls_failures_total", c.tls_failures)
      .add("stalled_total", c.stalled)
      .add("rejected_connections_total", c.rejected)
      .add_times("landing_wait_ns", c.landing_waits);
  for (size_t i = 0; i < kOpNames.size(); ++i)
    list.add_times(std::string("operation_ns.") + kOpNames[i], c.operations[i]);
  for (const auto& [name, up] : tier_asks_.up()) list.add("tier_up." + name, up ? 1 : 0);
  const Tenants& tenants = state_.options.tenants;
  for (uint32_t i = 1; i <= tenants.count(); ++i)
    if (!tenant || *tenant == i)
      add_tenant(list, tenants.names()[i - 1], state_.table.quotas().use(i),
                 state_.tenant_counts[i], tenants.quotas()[i - 1]);
  if (state_.disk != nullptr) state_.disk->add_stats(list);
  else add_disk_stats(list, {}, {});
  return list.take();
}

}  // namespace kv
