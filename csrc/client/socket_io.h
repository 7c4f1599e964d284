// The client's end of a connection: bytes over a stream socket, each call by a deadline.
#pragma once

#include <sys/uio.h>

#include <chrono>
#include <cstddef>
#include <span>

#include "net/tls.h"

namespace kv {

using Deadline = std::chrono::steady_clock::time_point;

// kClosed: the peer ended it. kFailed: errno tells. kNonsense: the peer broke the protocol.
// kInterrupted: a signal came, and its handler wants no more of this.
enum class IoResult { kDone, kTimeout, kClosed, kFailed, kNonsense, kInterrupted };

// A connection that frames and payloads travel on: a stream socket, with TLS over it or without.
// Used by one thread at a time. The socket may block or not, and stays its owner's.
struct Wire {
  explicit Wire(int socket) : fd(socket) {}
  Wire(int socket, TlsStream& stream) : fd(socket), tls(&stream) {}

  int fd;
  TlsStream* tls = nullptr;
  std::chrono::duration<double> patience{0};  // what SO_RCVTIMEO is set to
  bool (*interrupted)() = nullptr;            // asked after each signal: whether to give up
};

// Both ends know each other; of a TLS client, before anything else. EPROTO: TlsStream::why().
IoResult shake_hands(Wire& wire, Deadline deadline);
// Sends all of the spans, which it changes.
IoResult send_spans(Wire& wire, std::span<iovec> spans, Deadline deadline);
// What was sent is with the socket: TLS keeps some of it.
IoResult flush(Wire& wire, Deadline deadline);
// Fills the spans with what has come, at least one byte; how many is left in `received`. (To wait
// for all of it costs more: the peer sends while we digest.)
IoResult receive_spans(Wire& wire, std::span<iovec> spans, Deadline deadline, size_t& received);
// Whether the connection stands, as far as can be seen at once, and nothing came unasked.
bool quiet(Wire& wire);

}  // namespace kv
