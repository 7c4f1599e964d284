// What a node tells of itself. The names are read by kvstore/metrics.py.
#include "node.h"

namespace kv {

StatList::Values Node::stats() const {
  const TableCounts& table = table_.counts();
  const Counters& c = counters_;
  CountsBy<Transport, kTransportNames.size()> connections;
  for (const auto& [id, session] : sessions_) ++connections[session->transport()];
  StatList list;
  list.add("pool_bytes", slab_.pool_bytes())
      .add("free_bytes", slab_.free_bytes())
      .add("used_bytes", slab_.pool_bytes() - slab_.free_bytes())
      .add("blocks", table_.blocks())
      .add("reserved_blocks", table.reserved_blocks)
      .add("fenced_blocks", fences_.slots())
      .add("pinned_blocks", table.pinned_blocks)
      .add("leases", leases_.size())
      .add("leased_blocks", leases_.blocks())
      .add("waits", waits_.size())
      .add_each("connections", kTransportNames, connections.values)
      .add("draining", draining_ ? 1 : 0)
      .add("manifests", registry_.manifests().size())
      .add("connections_total", c.connections)
      .add_each("hits_total", kTierNames, {c.hits})
      .add_each("misses_total", kTierNames, {c.misses})
      .add("puts_total", c.puts)
      .add("commits_total", c.commits)
      .add("aborts_total", c.aborts)
      .add_each("evictions_total", kEvictionNames, {table.evictions, c.deleted, c.purged})
      .add("no_space_total", c.no_space)
      .add("corrupt_total", c.corrupt)
      .add("fenced_total", c.fenced)
      .add_each("bytes_in_total", kTransportNames, c.bytes_in.values)
      .add_each("bytes_out_total", kTransportNames, c.bytes_out.values)
      .add("refusals_total", c.refusals)
      .add_each("landings_total", kLandingNames, c.landings.values)
      .add("bad_frames_total", c.bad_frames)
      .add("unauthorized_total", c.unauthorized)
      .add("stalled_total", c.stalled)
      .add_times("landing_wait_ns", c.landing_waits);
  for (size_t i = 0; i < kOpNames.size(); ++i)
    list.add_times(std::string("operation_ns.") + kOpNames[i], c.operations[i]);
  return list.take();
}

}  // namespace kv
