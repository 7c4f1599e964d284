// How much of the pool each client has reserved, lent, or fenced: slots that are no block's yet.
#pragma once

#include <sys/socket.h>

#include <unordered_map>

#include "memory/slab.h"

namespace kv {

// The connection that fills a slot. `client` is the same for all connections of one client.
struct Writer {
  uint64_t session = 0;
  uint64_t client = 0;
  uint32_t region = Slab::kAnyRegion;
};

// All connections of a process over a Unix socket are one client, by the process id from the kernel
// (unix(7), SO_PEERCRED). Any other connection is a client of its own.
inline uint64_t client_of(int socket, bool local, uint64_t session) {
  constexpr uint64_t kProcess = uint64_t{1} << 63;  // no session id has this bit
  ucred peer{};
  socklen_t size = sizeof peer;
  const bool known = local && getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 &&
                     peer.pid > 0;  // 0: of another PID namespace
  return known ? kProcess | static_cast<uint64_t>(peer.pid) : session;
}

// Counts whole granules, from a slot's allocation until it is a block's or free. Not thread-safe.
class ClientHolds {
 public:
  ClientHolds(const Slab& slab, uint64_t most_bytes) : slab_(slab), most_bytes_(most_bytes) {}

  // Whether a client may have another slot of this size. Its first one may have any size.
  bool may_take(uint64_t client, uint64_t bytes) const {
    const auto found = held_.find(client);
    return found == held_.end() || found->second + slab_.rounded(bytes) <= most_bytes_;
  }
  void took(uint64_t client, uint64_t bytes) { held_[client] += slab_.rounded(bytes); }
  void gave(uint64_t client, uint64_t bytes) {
    const auto found = held_.find(client);
    found->second -= slab_.rounded(bytes);
    if (found->second == 0) held_.erase(found);
  }
  bool empty() const { return held_.empty(); }

 private:
  const Slab& slab_;
  const uint64_t most_bytes_;
  std::unordered_map<uint64_t, uint64_t> held_;  // bytes, by client
};

}  // namespace kv
