#include "socket_io.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>

#include "crc32c.h"
#include "wire.h"

namespace kv {
namespace {

using Clock = std::chrono::steady_clock;
constexpr size_t kMaxSpans = 256;
// Small enough to be in the L2 cache for its CRC, large enough for the syscall not to matter.
constexpr size_t kChunkBytes = 256u << 10;
// Few wake-ups of the receiver matter more to a sender than its caches.
constexpr size_t kSendBytes = 4u << 20;

Clock::time_point after(double seconds) {
  const double bounded = std::clamp(seconds, 0.0, 86400.0);
  return Clock::now() +
         std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(bounded));
}

// What follows a block: its CRC32C.
struct Line {
  uint8_t bytes[wire::kLineBytes] = {};
};

// Walks over the bytes of blocks in order, as spans of the caller's memory.
class Walk {
 public:
  Walk(const Segments& segments, const std::vector<size_t>& indices)
      : segments_(segments), indices_(indices) {
    skip_empty();
  }
  bool done() const { return block_ == indices_.size(); }
  size_t block() const { return block_; }

  // The next bytes that lie together, at most `most`.
  iovec span(size_t most) const {
    return {segments_.at(segment_, indices_[block_]) + offset_,
            std::min(most, segments_.sizes[segment_] - offset_)};
  }
  // Steps over `bytes` <= the span's. True if that ended a block.
  bool step(size_t bytes) {
    const size_t before = block_;
    offset_ += bytes;
    skip_empty();
    return block_ != before;
  }

 private:
  void skip_empty() {
    while (block_ < indices_.size() && offset_ == segments_.sizes[segment_]) {
      offset_ = 0;
      if (++segment_ == segments_.sizes.size()) segment_ = 0, ++block_;
    }
  }

  const Segments& segments_;
  const std::vector<size_t>& indices_;
  size_t block_ = 0, segment_ = 0, offset_ = 0;
};

// Waits until `fd` is ready for `events`. kDone if it is (or has failed: the next call will tell).
IoResult wait_ready(int fd, short events, Clock::time_point deadline) {
  while (true) {
    const auto left = std::chrono::duration<double, std::milli>(deadline - Clock::now()).count();
    if (left <= 0) return IoResult::kTimeout;
    pollfd waiting{fd, events, 0};
    const int ready = poll(&waiting, 1, static_cast<int>(std::ceil(left)));
    if (ready > 0) return IoResult::kDone;
    if (ready < 0 && errno != EINTR) return IoResult::kFailed;
  }
}

// What a failed send or recv means: kDone to try again.
IoResult after_error(int fd, short events, Clock::time_point deadline) {
  if (errno == EINTR) return IoResult::kDone;
  if (errno == EAGAIN || errno == EWOULDBLOCK) return wait_ready(fd, events, deadline);
  return errno == EPIPE || errno == ECONNRESET ? IoResult::kClosed : IoResult::kFailed;
}

ssize_t send_some(const Wire& wire, iovec* spans, size_t count) {
  if (wire.tls != nullptr) return wire.tls->write(spans, count);
  msghdr message{};
  message.msg_iov = spans;
  message.msg_iovlen = count;
  return sendmsg(wire.fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

ssize_t recv_some(const Wire& wire, iovec* spans, size_t count) {
  if (wire.tls != nullptr) return wire.tls->read(spans, count);
  msghdr message{};
  message.msg_iov = spans;
  message.msg_iovlen = count;
  return recvmsg(wire.fd, &message, MSG_DONTWAIT);
}

IoResult send_all(const Wire& wire, std::vector<iovec>& spans, Clock::time_point deadline) {
  size_t first = 0;
  while (first < spans.size()) {
    ssize_t sent = send_some(wire, &spans[first], spans.size() - first);
    if (sent < 0) {
      const IoResult result = after_error(wire.fd, POLLOUT, deadline);
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

// What TLS has sealed is with the socket.
IoResult flush_all(const Wire& wire, Clock::time_point deadline) {
  while (wire.tls != nullptr && wire.tls->flush() != 0) {
    const IoResult result = after_error(wire.fd, POLLOUT, deadline);
    if (result != IoResult::kDone) return result;
  }
  return IoResult::kDone;
}

}  // namespace

IoResult shake_hands(const Wire& wire, double deadline_s) {
  const auto deadline = after(deadline_s);
  while (wire.tls->handshake() != 0) {
    const short events = wire.tls->writing() ? POLLOUT : POLLIN;
    const IoResult result = after_error(wire.fd, events, deadline);
    if (result != IoResult::kDone) return result;
  }
  return IoResult::kDone;
}

IoResult send_bytes(const Wire& wire, std::string_view bytes, double deadline_s) {
  const auto deadline = after(deadline_s);
  std::vector<iovec> span{{const_cast<char*>(bytes.data()), bytes.size()}};
  const IoResult result = send_all(wire, span, deadline);
  return result == IoResult::kDone ? flush_all(wire, deadline) : result;
}

IoResult recv_bytes(const Wire& wire, char* to, size_t most, double deadline_s, size_t& received) {
  const auto deadline = after(deadline_s);
  while (true) {
    iovec span{to, most};
    const ssize_t got = recv_some(wire, &span, 1);
    if (got == 0) return IoResult::kClosed;
    if (got > 0) return received = static_cast<size_t>(got), IoResult::kDone;
    const IoResult result = after_error(wire.fd, POLLIN, deadline);
    if (result != IoResult::kDone) return result;
  }
}

IoResult recv_blocks(const Wire& wire, const Segments& segments,
                     const std::vector<size_t>& indices, double deadline_s, bool digest,
                     std::vector<uint32_t>& crcs) {
  const auto deadline = after(deadline_s);
  crcs.assign(indices.size(), 0);
  std::vector<iovec> spans;
  for (Walk walk(segments, indices); !walk.done();) {
    spans.clear();
    Walk ahead = walk;
    for (size_t bytes = 0; !ahead.done() && spans.size() < kMaxSpans && bytes < kChunkBytes;) {
      spans.push_back(ahead.span(kChunkBytes - bytes));
      bytes += spans.back().iov_len;
      ahead.step(spans.back().iov_len);
    }
    ssize_t got = recv_some(wire, spans.data(), spans.size());
    if (got == 0) return IoResult::kClosed;
    if (got < 0) {
      const IoResult result = after_error(wire.fd, POLLIN, deadline);
      if (result != IoResult::kDone) return result;
      continue;
    }
    while (got > 0) {
      const iovec span = walk.span(static_cast<size_t>(got));
      uint32_t& crc = crcs[walk.block()];
      if (digest) crc = crc32c(span.iov_base, span.iov_len, crc);
      walk.step(span.iov_len);
      got -= static_cast<ssize_t>(span.iov_len);
    }
  }
  return IoResult::kDone;
}

IoResult send_blocks(const Wire& wire, std::string_view prefix, const Segments& segments,
                     const std::vector<size_t>& indices, double deadline_s,
                     std::vector<uint32_t>& crcs) {
  const auto deadline = after(deadline_s);
  crcs.assign(indices.size(), 0);
  std::vector<Line> lines(indices.size());
  std::vector<iovec> spans;
  if (!prefix.empty()) spans.push_back({const_cast<char*>(prefix.data()), prefix.size()});
  for (Walk walk(segments, indices); !walk.done() || !spans.empty(); spans.clear()) {
    for (size_t bytes = 0; !walk.done() && spans.size() < kMaxSpans && bytes < kSendBytes;) {
      const iovec span = walk.span(kSendBytes - bytes);
      uint32_t& crc = crcs[walk.block()];
      crc = crc32c(span.iov_base, span.iov_len, crc);
      spans.push_back(span);
      bytes += span.iov_len;
      Line& line = lines[walk.block()];
      if (!walk.step(span.iov_len)) continue;
      std::memcpy(line.bytes, &crc, sizeof crc);
      spans.push_back({line.bytes, sizeof line.bytes});
    }
    const IoResult result = send_all(wire, spans, deadline);
    if (result != IoResult::kDone) return result;
  }
  return flush_all(wire, deadline);
}

}  // namespace kv
