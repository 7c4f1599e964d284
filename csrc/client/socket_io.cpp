#include "client/socket_io.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <algorithm>
#include <cerrno>
#include <cmath>

#include "base/clock.h"

namespace kv {
namespace {

using Seconds = std::chrono::duration<double>;

// A signal just before a wait does not interrupt it: so waits are cut into pieces.
constexpr Seconds kLongestWait{1.0};

// kInterrupted, or kDone: go on after a (possible) signal.
IoResult after_signal(const Wire& wire) {
  const bool stop = wire.interrupted != nullptr && wire.interrupted();
  return stop ? IoResult::kInterrupted : IoResult::kDone;
}

// Waits until `fd` is ready for `events`. kDone: it is, or it has failed, as the next call shows.
IoResult wait_ready(const Wire& wire, short events, Deadline deadline) {
  while (true) {
    const auto left = std::chrono::duration<double, std::milli>(deadline - Clock::now()).count();
    if (left <= 0) return IoResult::kTimeout;
    pollfd waiting{wire.fd, events, 0};
    const double most = std::chrono::duration<double, std::milli>(kLongestWait).count();
    const int ready = poll(&waiting, 1, static_cast<int>(std::ceil(std::min(left, most))));
    if (ready > 0) return IoResult::kDone;
    if (ready < 0 && errno != EINTR) return IoResult::kFailed;
    if (after_signal(wire) != IoResult::kDone) return IoResult::kInterrupted;
  }
}

// What a failed send or recv means. kDone: try again.
IoResult after_error(const Wire& wire, short events, Deadline deadline) {
  if (errno == EINTR) return after_signal(wire);
  if (errno == EAGAIN || errno == EWOULDBLOCK) {
    const IoResult result = after_signal(wire);
    return result == IoResult::kDone ? wait_ready(wire, events, deadline) : result;
  }
  return errno == EPIPE || errno == ECONNRESET ? IoResult::kClosed : IoResult::kFailed;
}

// Lets the kernel watch the deadline of a recv: one system call less than a poll before it. Sets
// SO_RCVTIMEO again only if its value is too long, or so short that recv would return in vain.
IoResult set_receive_timeout(Wire& wire, Deadline deadline) {
  const Seconds left = deadline - Clock::now();
  if (left.count() <= 0) return IoResult::kTimeout;
  const Seconds patience = std::min(left * 0.75, kLongestWait);
  if (wire.patience <= left && wire.patience >= patience / 1.5) return IoResult::kDone;
  const auto micros = std::max<int64_t>(1, std::llround(patience.count() * 1e6));
  const timeval limit{micros / 1'000'000, micros % 1'000'000};
  if (setsockopt(wire.fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) != 0)
    return IoResult::kFailed;
  wire.patience = patience;
  return IoResult::kDone;
}

ssize_t send_some(const Wire& wire, iovec* spans, size_t count) {
  if (wire.tls != nullptr) return wire.tls->write(spans, count);
  msghdr message{};
  message.msg_iov = spans;
  message.msg_iovlen = count;
  return sendmsg(wire.fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

ssize_t receive_some(const Wire& wire, std::span<iovec> spans) {
  if (wire.tls != nullptr) return wire.tls->read(spans.data(), spans.size());
  msghdr message{};
  message.msg_iov = spans.data();
  message.msg_iovlen = spans.size();
  return recvmsg(wire.fd, &message, 0);
}

}  // namespace

IoResult tls_handshake(Wire& wire, Deadline deadline) {
  while (wire.tls->handshake() != 0) {
    const short events = wire.tls->writing() ? POLLOUT : POLLIN;
    const IoResult result = after_error(wire, events, deadline);
    if (result != IoResult::kDone) return result;
  }
  return IoResult::kDone;
}

IoResult send_spans(Wire& wire, std::span<iovec> spans, Deadline deadline) {
  size_t first = 0;
  while (first < spans.size()) {
    ssize_t sent = send_some(wire, &spans[first], spans.size() - first);
    if (sent < 0) {
      const IoResult result = after_error(wire, POLLOUT, deadline);
      if (result != IoResult::kDone) return result;
      continue;
    }
    for (; first < spans.size() && static_cast<size_t>(sent) >= spans[first].iov_len; ++first)
      sent -= static_cast<ssize_t>(spans[first].iov_len);
    if (sent > 0) {
      spans[first].iov_base = static_cast<uint8_t*>(spans[first].iov_base) + sent;
      spans[first].iov_len -= static_cast<size_t>(sent);
    }
  }
  return IoResult::kDone;
}

IoResult flush(Wire& wire, Deadline deadline) {
  while (wire.tls != nullptr && wire.tls->flush() != 0) {
    const IoResult result = after_error(wire, POLLOUT, deadline);
    if (result != IoResult::kDone) return result;
  }
  return IoResult::kDone;
}

IoResult receive_spans(Wire& wire, std::span<iovec> spans, Deadline deadline, size_t& received) {
  while (true) {
    IoResult result = wire.tls == nullptr    ? set_receive_timeout(wire, deadline)
                      : wire.tls->readable() ? IoResult::kDone
                                             : wait_ready(wire, POLLIN, deadline);
    if (result != IoResult::kDone) return result;
    const ssize_t got = receive_some(wire, spans);
    if (got == 0) return IoResult::kClosed;
    if (got > 0) return received = static_cast<size_t>(got), IoResult::kDone;
    result = after_error(wire, POLLIN, deadline);
    if (result != IoResult::kDone) return result;
  }
}

bool quiet(Wire& wire) {
  if (wire.tls != nullptr) return wire.tls->quiet();
  char next;
  return recv(wire.fd, &next, sizeof next, MSG_PEEK | MSG_DONTWAIT) < 0 &&
         (errno == EAGAIN || errno == EWOULDBLOCK);
}

}  // namespace kv
