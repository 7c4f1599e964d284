// What a node tells of itself. The names are read by kvstore/metrics.py.
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

}  // namespace

namespace {

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
  const TableCounts& table = table_.counts();
  const Counters& c = counters_;
  CountsBy<Transport, kTransportNames.size()> connections;
  uint64_t fenced_blocks = fences_.slots(), fenced_bytes = fences_.bytes();
  for (const auto& [id, session] : sessions_) {
    ++connections[session->transport()];
    fenced_blocks += session->expired.size();
    for (const auto& [generation, one] : session->expired) fenced_bytes += one.slot.bytes;
  }
  uint64_t leases = leases_.size(), leased_blocks = leases_.blocks();
  for (const Session* session : neighbours_) {
    leases += session->pins->leases();
    leased_blocks += session->pins->blocks();
  }
  CountsBy<Pages, kPagesNames.size()> page_bytes;
  page_bytes[options_.pages] = options_.page_bytes;
  StatList list;
  list.add("pool_bytes", slab_.pool_bytes())
      .add("free_bytes", slab_.free_bytes())
      .add("used_bytes", slab_.pool_bytes() - slab_.free_bytes() - lent_bytes_)
      .add_each("page_bytes", kPagesNames, page_bytes.values);
  add_numa_nodes(list, slab_, options_.regions);
  list.add("blocks", table_.blocks())
      .add("reserved_blocks", table.reserved_blocks)
      .add("lent_bytes", lent_bytes_)
      .add("fenced_blocks", fenced_blocks)
      .add("fenced_bytes", fenced_bytes)
      .add("pinned_blocks", table.pinned_blocks)
      .add("leases", leases)
      .add("leased_blocks", leased_blocks)
      .add("waits", waits_.size() + ended_waits_.size())
      .add_each("connections", kTransportNames, connections.values)
      .add("queue_pairs", attachments_.size())
      .add("draining", draining_ ? 1 : 0)
      .add("manifests", registry_.manifests().size())
      .add("connections_total", c.connections)
      .add_each("hits_total", kTierNames, c.hits.values)
      .add_each("misses_total", kTierNames, c.misses.values)
      .add("puts_total", c.puts)
      .add("commits_total", c.commits)
      .add_each("posts_total", kPostedNames, c.posts.values)
      .add("aborts_total", c.aborts)
      .add_each("evictions_total", kEvictionNames, {table.evictions, c.deleted, c.purged})
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
  const Tenants& tenants = options_.tenants;
  for (uint32_t i = 1; i <= tenants.count(); ++i)
    if (!tenant || *tenant == i)
      add_tenant(list, tenants.names()[i - 1], table_.quotas().use(i), tenant_counts_[i],
                 tenants.quotas()[i - 1]);
  if (disk_ != nullptr) disk_->add_stats(list);
  else add_disk_stats(list, {}, {});
  return list.take();
}

}  // namespace kv
