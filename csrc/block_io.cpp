#include "block_io.h"

#include <algorithm>
#include <cstring>

#include "crc32c.h"
#include "wire.h"

namespace kv {
namespace {

constexpr size_t kMaxSpans = 256;
// Small enough to be in the L2 cache for its CRC, large enough for the syscall not to matter.
constexpr size_t kChunkBytes = 256u << 10;
// Large enough to wake the receiver seldom; what was just digested is still near when it is copied.
constexpr size_t kSendBytes = 1u << 20;

// What follows a block: its CRC32C.
struct Line {
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

void BlockLanding::next_spans(std::vector<iovec>& spans) const {
  const size_t most = spans.size() + kMaxSpans;
  BlockWalk ahead = walk_;
  for (size_t bytes = 0; !ahead.done() && spans.size() < most && bytes < kChunkBytes;) {
    spans.push_back(ahead.span(kChunkBytes - bytes));
    bytes += spans.back().iov_len;
    ahead.step(spans.back().iov_len);
  }
}

void BlockLanding::landed(size_t bytes) {
  while (bytes != 0) {
    const iovec span = walk_.span(bytes);
    uint32_t& crc = crcs_[walk_.block()];
    if (digest_) crc = crc32c(span.iov_base, span.iov_len, crc);
    walk_.step(span.iov_len);
    bytes -= span.iov_len;
  }
}

void BlockLanding::take(const uint8_t* data, size_t size) {
  while (size != 0) {
    const iovec span = walk_.span(size);
    std::memcpy(span.iov_base, data, span.iov_len);
    landed(span.iov_len);
    data += span.iov_len, size -= span.iov_len;
  }
}

IoResult BlockLanding::receive(Wire& wire, Deadline deadline) {
  std::vector<iovec> spans;
  while (!done()) {
    spans.clear();
    next_spans(spans);
    size_t received = 0;
    const IoResult result = receive_spans(wire, spans, deadline, received);
    if (result != IoResult::kDone) return result;
    landed(received);
  }
  return IoResult::kDone;
}

IoResult send_blocks(Wire& wire, std::string_view prefix, const Segments& segments,
                     const std::vector<size_t>& indices, bool digest, Deadline deadline) {
  std::vector<Line> lines(indices.size());
  std::vector<iovec> spans;
  const size_t pieces = indices.size() * (segments.sizes.size() + 1);
  spans.reserve(1 + std::min(pieces, kMaxSpans));
  spans.push_back({const_cast<char*>(prefix.data()), prefix.size()});
  uint32_t crc = 0;
  for (BlockWalk walk(segments, indices); !walk.done() || !spans.empty(); spans.clear()) {
    for (size_t bytes = 0; !walk.done() && spans.size() < kMaxSpans && bytes < kSendBytes;) {
      const iovec span = walk.span(kSendBytes - bytes);
      Line& line = lines[walk.block()];
      if (digest) crc = crc32c(span.iov_base, span.iov_len, crc);
      spans.push_back(span);
      bytes += span.iov_len;
      if (!walk.step(span.iov_len)) continue;
      std::memcpy(line.bytes, &crc, sizeof crc);
      spans.push_back({line.bytes, sizeof line.bytes});
      crc = 0;
    }
    const IoResult result = send_spans(wire, spans, deadline);
    if (result != IoResult::kDone) return result;
  }
  return flush(wire, deadline);
}

}  // namespace kv
