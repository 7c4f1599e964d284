// What this node holds, told to its host as it changes: for events to routers, and for tiers below.
#pragma once

#include <deque>
#include <unordered_set>

#include "base/event_fd.h"
#include "node/state.h"

namespace kv {

struct BlockChange {
  bool stored = false;  // the node holds it whole, in memory or on the disk; else not any more
  bool in_memory = false;  // of a stored one
  std::string tenant;
  Hash manifest{};
  Hash hash{};
  std::optional<Hash> parent;  // of a stored one
};

// Names are queued when something happens to their block; what is true then is looked up when they
// are taken. A change may be told twice.
class Feed {
 public:
  static constexpr size_t kMaxTaken = 1024;

  explicit Feed(NodeState& state) : state_(state) {}

  // For the parts of the node.
  // A part of this block was committed, or the block has left memory or disk.
  void changed(const BlockKey& key);
  // More has changed than can be told.
  void lose();

  // For the host.
  // From now on changes are kept, at most `most`. 0 or an errno.
  int offer(size_t most);
  // Readable while there is something to take. -1 before the first offer.
  int ready_fd() const { return ready_.get(); }
  // All that the node holds is told once more, as stored.
  void restart();
  struct Taken {
    std::vector<BlockChange> changes;
    bool lost = false;  // changes before these were lost
  };
  Taken take();

 private:
  void sweep();
  void tell(const BlockKey& key, std::vector<BlockChange>& changes) const;

  NodeState& state_;
  EventFd ready_;
  size_t most_ = 0;
  std::deque<BlockKey> queue_;
  std::unordered_set<BlockKey, BlockKeyHash> queued_;
  bool lost_ = false;
  int sweeping_ = 0;  // tables that are still to be swept: memory, then disk
  Table::Sweep sweep_;
};

}  // namespace kv
