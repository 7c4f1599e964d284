// Preloaded into a peer that listens on every address, whatever its options: its sockets stay on
// loopback. A dual-stack wildcard becomes the mapped 127.0.0.1, so that IPv4 clients still reach it.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>

typedef int bind_fn(int, const struct sockaddr *, socklen_t);

int bind(int fd, const struct sockaddr *address, socklen_t bytes) {
  static const uint8_t kMapped[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 0, 0, 1};
  bind_fn *next = (bind_fn *)dlsym(RTLD_NEXT, "bind");
  struct sockaddr_in v4;
  struct sockaddr_in6 v6;
  if (address->sa_family == AF_INET && bytes >= sizeof v4) {
    memcpy(&v4, address, sizeof v4);
    if (v4.sin_addr.s_addr == htonl(INADDR_ANY)) v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return next(fd, (const struct sockaddr *)&v4, sizeof v4);
  }
  if (address->sa_family == AF_INET6 && bytes >= sizeof v6) {
    memcpy(&v6, address, sizeof v6);
    if (!memcmp(&v6.sin6_addr, &in6addr_any, 16)) memcpy(&v6.sin6_addr, kMapped, 16);
    return next(fd, (const struct sockaddr *)&v6, sizeof v6);
  }
  return next(fd, address, bytes);
}
