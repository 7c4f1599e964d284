// Blocks that are forgotten in both tiers.
#pragma once

#include "node/state.h"

namespace kv {

// Forgets the block in memory, which `counter` counts, and on the disk. False: it was in neither.
bool forget(NodeState& state, const BlockKey& key, uint64_t& counter);

// Forgets all blocks, or those of one tenant: in turns, until go_on() returns true.
class Purge {
 public:
  explicit Purge(NodeState& state, std::optional<uint32_t> tenant = std::nullopt);
  bool go_on();
  uint64_t removed() const { return removed_; }

 private:
  NodeState* state_;
  std::optional<std::unordered_set<uint32_t>> specs_;  // nullopt: all
  int tables_ = 0;                                     // swept so far
  Table::Sweep sweep_;
  uint64_t removed_ = 0;
};

}  // namespace kv
