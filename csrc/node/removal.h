// DELETE and PURGE: blocks that are forgotten in both tiers.
#pragma once

#include <optional>
#include <unordered_set>

#include "node/replies.h"

namespace kv {

// Forgets the block in memory and on the disk; `counter` counts those that were in memory. False:
// it was in neither.
bool forget(NodeState& state, const BlockKey& key, uint64_t& counter);

// Forgets all blocks, or those of one tenant: in turns, until go_on() returns true.
class Purge {
 public:
  explicit Purge(NodeState& state, std::optional<uint32_t> tenant = std::nullopt);
  bool go_on();
  // How many blocks are forgotten so far.
  uint64_t removed() const { return removed_; }

 private:
  NodeState* state_;
  std::optional<std::unordered_set<uint32_t>> specs_;  // nullopt: all
  int tables_ = 0;                                     // swept so far
  Table::Sweep sweep_;
  uint64_t removed_ = 0;
};

class Removal {
 public:
  Removal(NodeState& state, Replies& replies) : state_(state), replies_(replies) {}

  bool remove(Session& session, const wire::Header& header, const wire::BlocksRequest& request);
  bool purge(Session& session, const wire::Header& header, const wire::EmptyRequest& request);

 private:
  NodeState& state_;
  Replies& replies_;
};

}  // namespace kv
