#include "net/listener.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>
#include <memory>

namespace kv {
namespace {

constexpr int kBacklog = 512;

int bind_one(const addrinfo& address, uint16_t& port, File& out) {
  File socket(::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket) return errno;
  const int on = 1;
  setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(socket.get(), address.ai_addr, address.ai_addrlen) != 0) return errno;
  if (listen(socket.get(), kBacklog) != 0) return errno;
  sockaddr_storage bound{};
  socklen_t size = sizeof bound;
  if (getsockname(socket.get(), reinterpret_cast<sockaddr*>(&bound), &size) != 0) return errno;
  port = ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(bound).sin6_port
                                           : reinterpret_cast<sockaddr_in&>(bound).sin_port);
  out = std::move(socket);
  return 0;
}

// Whether a socket file was left behind by a server that does not run any more.
bool is_stale(const sockaddr_un& address) {
  struct stat info {};
  if (lstat(address.sun_path, &info) != 0 || !S_ISSOCK(info.st_mode)) return false;
  const File probe(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!probe) return false;
  const int result =
      connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address);
  return result != 0 && errno == ECONNREFUSED;
}

}  // namespace

int listen_tcp(const std::string& host, uint16_t& port, File& out) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0)
    return EADDRNOTAVAIL;
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> addresses(found, freeaddrinfo);
  int error = EADDRNOTAVAIL;
  for (const addrinfo* at = addresses.get(); at != nullptr; at = at->ai_next) {
    error = bind_one(*at, port, out);
    if (error == 0) break;
  }
  return error;
}

int listen_unix(const std::string& path, unsigned mode, File& out) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof address.sun_path) return ENAMETOOLONG;
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  File socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket) return errno;
  const auto* name = reinterpret_cast<const sockaddr*>(&address);
  if (bind(socket.get(), name, sizeof address) != 0) {
    if (errno != EADDRINUSE) return errno;
    if (!is_stale(address)) return EADDRINUSE;
    if (unlink(path.c_str()) != 0 || bind(socket.get(), name, sizeof address) != 0) return errno;
  }
  // No client can connect before listen(): the mode applies to every connection.
  if (chmod(path.c_str(), static_cast<mode_t>(mode)) != 0 || listen(socket.get(), kBacklog) != 0) {
    const int error = errno;
    unlink(path.c_str());
    return error;
  }
  out = std::move(socket);
  return 0;
}

}  // namespace kv
