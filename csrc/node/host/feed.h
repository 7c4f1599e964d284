// What this node holds, told to its host as it changes: for events to routers, and for tiers below.
#pragma once

#include <deque>
#include <list>
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

// Names are queued when something happens to their block, at most `most`; what is true then is
// looked up when they are taken. A change may be told twice.
class Feed {
 public:
  static constexpr size_t kMaxTaken = 1024;

  Feed(NodeState& state, size_t most) : state_(state), most_(most) {}
  // 0 or an errno.
  int open() { return ready_.open(); }

  void changed(const BlockKey& key);
  void lose();
  void restart();
  // Readable while there is something to take. -1 unless open.
  int ready_fd() const { return ready_.get(); }
  struct Taken {
    std::vector<BlockChange> changes;
    bool lost = false;  // changes before these were lost
    bool more = false;  // can be taken now
  };
  Taken take();

 private:
  void sweep();
  void tell(const BlockKey& key, std::vector<BlockChange>& changes) const;

  NodeState& state_;
  const size_t most_;
  EventFd ready_;
  std::deque<BlockKey> queue_;
  std::unordered_set<BlockKey, BlockKeyHash> queued_;
  bool lost_ = false;
  int sweeping_ = 0;  // tables that are still to be swept: memory, then disk
  Table::Sweep sweep_;
};

// A feed for each part of the host that follows: one that is slow costs others nothing.
class Feeds {
 public:
  explicit Feeds(NodeState& state) : state_(state) {}

  // A part of this block was committed, or the block has left memory or disk.
  void changed(const BlockKey& key) {
    for (Feed& each : all_) each.changed(key);
  }
  // More has changed than can be told.
  void lose() {
    for (Feed& each : all_) each.lose();
  }
  // All that the node holds is told once more, as stored.
  void restart() {
    for (Feed& each : all_) each.restart();
  }
  // Begins a feed that keeps at most `most` changes, until the node ends. Its descriptor, or -1.
  int offer(size_t most);
  // By its descriptor; null: there is none.
  Feed* find(int descriptor);

 private:
  NodeState& state_;
  std::list<Feed> all_;
};

}  // namespace kv
