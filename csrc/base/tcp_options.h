// Options of TCP connections that both ends set.
#pragma once

namespace kv {

// Sends small frames at once (TCP_NODELAY). To a peer on this host, also without pacing: a
// congestion control that paces (bbr is the default of many hosts) sends blocks at half the speed,
// for a timer each few packets. A peer whose machine is gone is noticed within about a minute of
// silence (SO_KEEPALIVE). Errors are ignored.
void tune_tcp(int fd);

}  // namespace kv
