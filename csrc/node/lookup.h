// Which leading blocks of a request there are, in memory or on the disk.
#pragma once

#include "node/state.h"

namespace kv {

struct Found {
  uint32_t blocks = 0;
  uint32_t leading_in_memory = 0;
  uint32_t in_memory = 0;
  Block* last = nullptr;  // null if the last block is on the disk only
};

class Lookup {
 public:
  explicit Lookup(NodeState& state) : state_(state) {}

  // Counts the block in `found`, and with `touch` as used. False: it is in neither tier.
  bool find_next(Found& found, const BlockKey& key, const PartIds& parts, bool touch);
  // Goes on with `found` for as long as the turn lasts. True: the leading run is complete.
  bool find_more(Found& found, const Manifest& manifest, HashSpan hashes, bool touch);
  // Adds the places of blocks from `next` on that are in neither tier, for as long as the turn
  // lasts. True: there are no more.
  bool find_missing(std::vector<uint32_t>& missing, uint32_t& next, const Manifest& manifest,
                    HashSpan hashes);
  // The length of the leading run, at once.
  uint32_t find_all(uint32_t spec_id, const PartIds& parts, HashSpan hashes);
  // Counts hits and misses of a request for `asked` blocks.
  void count(const Session& session, const Found& found, uint32_t asked);
  // Of these missing blocks, leading ones that turned out to be in a tier below the node.
  void count_remote(const Session& session, uint32_t found, size_t missing);

 private:
  NodeState& state_;
};

}  // namespace kv
