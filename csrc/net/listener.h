// Listening sockets: TCP and Unix.
#pragma once

#include <string>

#include "base/file.h"

namespace kv {

// Binds and listens on a name or address; `port` 0 becomes the assigned one. 0 or an errno
// (EADDRNOTAVAIL for a host that does not resolve).
int listen_tcp(const std::string& host, uint16_t& port, File& out);

// Binds and listens on `path` with the file mode `mode`. Replaces the socket file of a server that
// does not run any more. EADDRINUSE if a server answers there, ENAMETOOLONG, or another errno.
int listen_unix(const std::string& path, unsigned mode, File& out);

}  // namespace kv
