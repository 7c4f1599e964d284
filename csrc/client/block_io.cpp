#include "client/block_io.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "digest/crc32c.h"
#include "wire/wire.h"

namespace kv {
namespace {

constexpr size_t kMaxSpans = 256;
// Small enough to be in the L2 cache for its CRC, large enough to make the system call cheap.
constexpr size_t kChunkBytes = 256u << 10;
// Large enough to wake the receiver seldom.
constexpr size_t kSendBytes = 1u << 20;
// With digests, less: the CRC finds the bytes in the L2 cache, where the kernel's copy has just
// brought them, and is computed while the receiver is busy.
constexpr size_t kDigestedBytes = 128u << 10;

// What follows a block: its CRC32C.
struct Line {
  iovec with(uint32_t crc) {
    std::memcpy(bytes, &crc, sizeof crc);
    return {bytes, sizeof bytes};
  }
  uint8_t bytes[wire::kLineBytes] = {};
};

}  // namespace

iovec BlockWalk::span(size_t most) const {
  return {segments_.at(segment_, indices_[block_]) + offset_,
          std::min(most, segments_.sizes[segment_] - offset_)};
}

bool BlockWalk::step(size_t bytes) {
  const size_t before = block_;
  offset_ += bytes;
  skip_empty();
  return block_ != before;
}

void BlockWalk::skip_empty() {
  while (block_ < end_ && offset_ == segments_.sizes[segment_]) {
    offset_ = 0;
    if (++segment_ == segments_.sizes.size()) segment_ = 0, ++block_;
  }
}

void BlockTransfer::next_spans(std::vector<iovec>& spans) const {
  const size_t most = spans.size() + kMaxSpans;
  BlockWalk ahead = walk_;
  for (size_t bytes = 0; !ahead.done() && spans.size() < most && bytes < kChunkBytes;) {
    spans.push_back(ahead.span(kChunkBytes - bytes));
    bytes += spans.back().iov_len;
    ahead.step(spans.back().iov_len);
  }
}

void BlockTransfer::moved(size_t bytes) {
  while (bytes != 0) {
    const iovec span = walk_.span(bytes);
    uint32_t& crc = crcs_[walk_.block()];
    if (digest_) crc = crc32c(span.iov_base, span.iov_len, crc);
    walk_.step(span.iov_len);
    bytes -= span.iov_len;
  }
}

void BlockTransfer::take(const uint8_t* data, size_t size) {
  while (size != 0) {
    const iovec span = walk_.span(size);
    std::memcpy(span.iov_base, data, span.iov_len);
    moved(span.iov_len);
    data += span.iov_len, size -= span.iov_len;
  }
}

IoResult BlockTransfer::receive(Wire& wire, Deadline deadline) {
  std::vector<iovec> spans;
  while (!done()) {
    spans.clear();
    next_spans(spans);
    size_t received = 0;
    const IoResult result = receive_spans(wire, spans, deadline, received);
    if (result != IoResult::kDone) return result;
    moved(received);
  }
  return IoResult::kDone;
}

IoResult send_blocks(Wire& wire, std::string_view prefix, const Segments& segments,
                     const std::vector<size_t>& indices, bool digest, Deadline deadline) {
  const size_t most = digest ? kDigestedBytes : kSendBytes;
  BlockTransfer sent(segments, indices, digest);
  std::vector<Line> lines(indices.size());
  std::vector<iovec> spans;
  const size_t pieces = indices.size() * (segments.sizes.size() + 1);
  spans.reserve(1 + std::min(pieces, kMaxSpans));
  spans.push_back({const_cast<char*>(prefix.data()), prefix.size()});
  for (BlockWalk walk(segments, indices); !walk.done() || !spans.empty();) {
    std::optional<size_t> due;  // the block whose line begins the next piece
    size_t ahead = 0;           // to be digested once sent
    for (size_t bytes = 0; !walk.done() && spans.size() < kMaxSpans && bytes < most;) {
      const iovec span = walk.span(most - bytes);
      const size_t block = walk.block();
      spans.push_back(span);
      bytes += span.iov_len, ahead += span.iov_len;
      if (!walk.step(span.iov_len)) continue;
      if (bytes == most && !walk.done()) {
        due = block;
      } else {
        sent.moved(std::exchange(ahead, 0));
        spans.push_back(lines[block].with(sent.crcs()[block]));
      }
    }
    const IoResult result = send_spans(wire, spans, deadline);
    if (result != IoResult::kDone) return result;
    sent.moved(ahead);
    spans.clear();
    if (due) spans.push_back(lines[*due].with(sent.crcs()[*due]));
  }
  return flush(wire, deadline);
}

}  // namespace kv
