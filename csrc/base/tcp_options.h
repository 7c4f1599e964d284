// Options of TCP connections that both ends set.
#pragma once

namespace kv {

// Nothing waits for more to send. Where the peer is on this host, nothing is paced either: a
// congestion control that does (bbr is many a host's default) sends blocks at half the speed, for a
// timer each few packets, and has no network to spare. A host that does not let it stays as it is.
void tune_tcp(int fd);

}  // namespace kv
