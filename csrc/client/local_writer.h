// Blocks written into a pool on this host, in slots that its node has lent, without asking it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "client/local_reader.h"
#include "memory/put_ring.h"

namespace kv {

// One thread at a time.
class LocalWriter {
 public:
  explicit LocalWriter(std::shared_ptr<LocalReader> reader);

  // What the node has lent: all slots that it has not got back, of this size, of which it lends
  // `most` at a time.
  void lent(uint64_t bytes, size_t most, const std::vector<uint64_t>& offsets,
            const std::vector<uint32_t>& generations);
  // No slots, of a size that is not known.
  void forget() { slots_.clear(), bytes_ = 0; }
  // Slots of this size to write.
  size_t stock(uint64_t bytes) const { return bytes == bytes_ ? slots_.size() : 0; }
  // How many of this size the node lends at a time, as far as is known: else any number.
  size_t most(uint64_t bytes) const { return bytes == bytes_ ? most_ : SIZE_MAX; }

  struct Request {
    const BlockNames& names;
    uint32_t manifest_id;
    size_t part;  // < names.part_ids.size()
    Hash parent;
    HashSpan hashes;
    const std::vector<size_t>& indices;  // as many as hashes, within the segments
    bool digest = true;                  // compute it; else it is posted as 0
  };
  struct Outcome {
    std::vector<uint8_t> statuses;  // of the leading blocks, as far as the stock went
    PutRing::State state = PutRing::State::kQuiet;
  };
  // STORED, or EXISTS where the node has the part already. kClosed: what was stored may never be
  // found.
  Outcome put(const PoolMapping& pool, const Segments& from, const Request& request);

 private:
  struct Lent {
    uint64_t offset;
    uint32_t generation;
  };
  bool exists(const Request& request, const PartKey& key);
  bool put_next(const PoolMapping& pool, const Segments& from, const Request& request,
                std::vector<uint8_t>& statuses);

  std::shared_ptr<LocalReader> reader_;
  PutRing ring_;
  uint64_t bytes_ = 0;
  size_t most_ = 0;
  std::deque<Lent> slots_;  // the oldest first
};

}  // namespace kv
