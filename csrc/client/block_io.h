// Payloads between a connection and the caller's memory; CRC32Cs of bytes that are in the cache.
#pragma once

#include <string_view>

#include "client/socket_io.h"
#include "memory/segments.h"

namespace kv {

// Walks over the bytes of blocks in order, as spans of the caller's memory.
class BlockWalk {
 public:
  // Both must outlive it.
  BlockWalk(const Segments& segments, const std::vector<size_t>& indices)
      : segments_(segments), indices_(indices), end_(indices.size()) {
    skip_empty();
  }
  bool done() const { return block_ == end_; }
  size_t block() const { return block_; }
  // Ends the walk after so many blocks.
  void end_after(size_t blocks) { end_ = blocks; }

  // The next contiguous bytes, at most `most`.
  iovec span(size_t most) const;
  // Steps over `bytes` <= the span's. True if that ended a block.
  bool step(size_t bytes);

 private:
  void skip_empty();

  const Segments& segments_;
  const std::vector<size_t>& indices_;
  size_t end_, block_ = 0, segment_ = 0, offset_ = 0;
};

// Blocks on their way into the caller's memory, or out of it, one after the other.
class BlockTransfer {
 public:
  BlockTransfer(const Segments& segments, const std::vector<size_t>& indices, bool digest)
      : walk_(segments, indices), digest_(digest), crcs_(indices.size()) {}
  // Only so many blocks come; at least those that have come already.
  void end_after(size_t blocks) { walk_.end_after(blocks); }
  bool done() const { return walk_.done(); }
  // Appends where the next bytes belong, as many as the caches hold.
  void next_spans(std::vector<iovec>& spans) const;
  // The next `bytes` are in place, or sent.
  void moved(size_t bytes);
  // Copies the next bytes into place; no more than belong to the blocks.
  void take(const uint8_t* data, size_t size);
  // Receives all the rest.
  IoResult receive(Wire& wire, Deadline deadline);
  // Of each block that has moved whole; zeros without `digest`.
  const std::vector<uint32_t>& crcs() const { return crcs_; }

 private:
  BlockWalk walk_;
  bool digest_;
  std::vector<uint32_t> crcs_;
};

// Sends `prefix`, then each block followed by the line with its CRC32C (with `digest`).
IoResult send_blocks(Wire& wire, std::string_view prefix, const Segments& segments,
                     const std::vector<size_t>& indices, bool digest, Deadline deadline);

}  // namespace kv
