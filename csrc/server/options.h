// What a server is started with.
#pragma once

#include "disk/tier.h"
#include "memory/pool.h"
#include "net/tls.h"
#include "table/eviction/policy.h"
#include "table/tenants.h"

namespace kv {

struct ServerOptions {
  std::string host = "127.0.0.1";
  uint16_t port = 0;      // 0: any
  std::string unix_path;  // "": no Unix socket
  uint64_t pool_bytes = 0;
  uint32_t granule_bytes = 16384;  // power of two, 4..64 KiB
  uint32_t node = 0;
  bool prefault = false;
  size_t max_connections = 1024;
  double frame_deadline_s = 30.0;  // for a frame, a MiB of payload, or a MiB of replies
  unsigned unix_mode = 0600;
  std::string eviction{kEvictionPolicies.front()};
  std::vector<TenantOptions> tenants{};     // none: no token is needed
  std::optional<TenantLimits> limits{};     // per tenant; default: TenantLimits::of
  std::shared_ptr<const TlsContext> tls{};  // of TCP; null: plain. The Unix socket always is.
  Placement placement{};
  DiskOptions disk{};
  std::optional<uint64_t> lend_bytes{};  // per client on this host; default: a share of the pool
  double hello_deadline_s = 5.0;         // from the connection to its HELLO, with the TLS handshake
  std::optional<uint64_t>
      reserve_bytes{};              // that one client may hold; default: a share of the pool
  double reserve_timeout_s = 30.0;  // the reservations of a connection end after this silence
  bool digests = true;              // false: no digest is computed or checked
  double spare_idle_s = 1.0;        // a connection that holds nothing gives way after this silence
};

}  // namespace kv
