// What the parts of a node share: its options, its blocks, its connections and its counters.
#pragma once

#include "base/turn.h"
#include "memory/pool.h"
#include "net/session.h"
#include "table/client_holds.h"
#include "table/counters.h"
#include "table/fences.h"
#include "table/leases.h"
#include "table/registry.h"
#include "table/table.h"
#include "table/tenants.h"

namespace kv {

class DiskTier;

struct NodeOptions {
  uint32_t granule_bytes = 16384;
  uint32_t node = 0;
  std::string unix_path;
  std::string boot_id;
  uint64_t epoch = 0;
  std::string eviction{kEvictionPolicies.front()};
  Tenants tenants{};
  TenantLimits limits{};
  Pages pages = Pages::kSmall;  // of the pool
  uint64_t page_bytes = 0;
  std::vector<PoolRegion> regions{};
  std::optional<uint64_t>
      lend_bytes{};  // per connection; default: LocalPeers::kLendShare of the pool
  std::optional<uint64_t> reserve_bytes{};  // per client; default: kReserveShare of the pool
  double reserve_timeout_s = 30.0;       // the reservations of a connection end after this silence
  bool digests = true;                   // false: no digest is computed or checked
  size_t max_connections = 1024;         // a HELLO beyond is refused
  uint32_t turn_blocks = Turn::kBlocks;  // a turn of a connection looks at so many blocks at most
};

// One thread. Writes, Reads, Landings, LocalPeers, Promotion and Attachments work on it. Each of
// them owns what it alone needs.
struct NodeState {
  static constexpr uint64_t kReserveShare = 4;  // of the pool: reserved, lent and fenced per client
  static constexpr uint64_t kMaxLeasedBlocks = 1u << 20;  // per connection

  NodeState(NodeOptions given, uint8_t* memory, uint64_t bytes);

  Session* find_session(uint64_t id) {
    const auto found = sessions.find(id);
    return found == sessions.end() ? nullptr : found->second.get();
  }
  TenantCounts& counts_of(const Session& session) { return tenant_counts[session.tenant]; }

  NodeOptions options;
  uint8_t* const pool;
  TimePoint now{};
  bool draining = false;
  Turn turn;
  Counters counters;
  std::vector<TenantCounts> tenant_counts;  // by tenant
  Slab slab;
  ClientHolds holds;
  Table table;
  Registry registry;
  Leases leases{table};
  Fences fences{table, holds};
  DiskTier* disk = nullptr;  // Promotion owns it
  std::unordered_map<uint64_t, std::unique_ptr<Session>> sessions;
};

}  // namespace kv
