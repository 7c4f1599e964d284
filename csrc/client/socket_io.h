// The client's end of a connection: bytes over a stream socket, each call with a deadline.
#pragma once

#include <sys/uio.h>

#include <chrono>
#include <span>

#include "net/tls.h"

namespace kv {

using Deadline = std::chrono::steady_clock::time_point;

// kClosed: by the peer. kFailed: with errno. kBadReply: the peer broke the protocol. kInterrupted:
// the handler of a signal has raised.
enum class IoResult { kDone, kTimeout, kClosed, kFailed, kBadReply, kInterrupted };

// A stream socket (not owned, blocking or not), with or without TLS. Used by one thread at a time.
struct Wire {
  int fd;
  TlsStream* tls = nullptr;                   // without one: null
  bool (*interrupted)() = nullptr;            // called after each signal; true: give up
  std::chrono::duration<double> patience{0};  // the value of SO_RCVTIMEO
};

// The TLS handshake, before anything else. EPROTO: TlsStream::why().
IoResult tls_handshake(Wire& wire, Deadline deadline);
// Sends all of the spans, which it changes.
IoResult send_spans(Wire& wire, std::span<iovec> spans, Deadline deadline);
// Passes bytes that TLS has kept to the socket.
IoResult flush(Wire& wire, Deadline deadline);
// Fills the spans with the bytes that have come, at least one; `received` is how many. (Waiting for
// all of them costs more: the peer sends while the client computes digests.)
IoResult receive_spans(Wire& wire, std::span<iovec> spans, Deadline deadline, size_t& received);
// Whether the connection is open, as far as can be seen at once, and nothing came unexpectedly.
bool quiet(Wire& wire);

}  // namespace kv
