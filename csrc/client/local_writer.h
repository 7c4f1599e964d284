// Puts blocks into lent slots of a pool on this host without a request.
#pragma once

#include <deque>

#include "client/local_reader.h"
#include "memory/put_ring.h"

namespace kv {

// One thread at a time.
class LocalWriter {
 public:
  explicit LocalWriter(std::shared_ptr<LocalReader> reader);

  // The reply to a LEND: all lent slots, of this size; the node lends at most `most` of them.
  void lent(uint64_t bytes, size_t most, const std::vector<uint64_t>& offsets,
            const std::vector<uint32_t>& generations);
  void forget() { slots_.clear(), bytes_ = 0; }
  // How many slots of this size are left.
  size_t stock(uint64_t bytes) const { return bytes == bytes_ ? slots_.size() : 0; }
  // How many of this size the node lends at most; SIZE_MAX if unknown.
  size_t most(uint64_t bytes) const { return bytes == bytes_ ? most_ : SIZE_MAX; }

  struct Request {
    const BlockNames& names;
    uint32_t manifest_id;
    size_t part;  // < names.part_ids.size()
    Hash parent;
    HashSpan hashes;
    const std::vector<size_t>& indices;  // as many as hashes, within the segments
    bool digest = true;                  // false: 0 is posted
  };
  struct Outcome {
    std::vector<uint8_t> statuses;  // of the leading blocks, as far as the slots sufficed
    PutRing::State state = PutRing::State::kQuiet;
  };
  // STORED, or EXISTS if the node has the part. With kClosed, stored parts may never be found.
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
