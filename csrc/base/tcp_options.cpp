#include "base/tcp_options.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cstring>
#include <initializer_list>
#include <string_view>

namespace kv {
namespace {

constexpr uint32_t kLoopbackNet = 127;

bool loopback(const sockaddr_in& address) {
  return ntohl(address.sin_addr.s_addr) >> 24 == kLoopbackNet;
}

// Whether both ends of the connection have the same address.
bool near(int fd) {
  sockaddr_storage own{}, peer{};
  socklen_t own_bytes = sizeof own, peer_bytes = sizeof peer;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&own), &own_bytes) != 0 ||
      getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_bytes) != 0 ||
      own.ss_family != peer.ss_family)
    return false;
  if (own.ss_family == AF_INET) {
    const auto& a = reinterpret_cast<const sockaddr_in&>(own);
    const auto& b = reinterpret_cast<const sockaddr_in&>(peer);
    return a.sin_addr.s_addr == b.sin_addr.s_addr || (loopback(a) && loopback(b));
  }
  if (own.ss_family != AF_INET6) return false;
  const auto& a = reinterpret_cast<const sockaddr_in6&>(own);
  const auto& b = reinterpret_cast<const sockaddr_in6&>(peer);
  return std::memcmp(&a.sin6_addr, &b.sin6_addr, sizeof a.sin6_addr) == 0;
}

// As store/kvrouter_store/connection/keep_alive.py.
void keep_alive(int fd) {
  const int on = 1, idle_s = 30, interval_s = 10, probes = 3;
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
}

}  // namespace

void tune_tcp(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  keep_alive(fd);
  if (!near(fd)) return;
  // Neither paces; the faster one may need a privilege, the other never does.
  for (const std::string_view kind : {"cubic", "reno"})
    if (setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, kind.data(),
                   static_cast<socklen_t>(kind.size())) == 0)
      return;
}

}  // namespace kv
