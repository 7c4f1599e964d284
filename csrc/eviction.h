// Who goes when the pool is full: the seam, and the policy of this store.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <utility>

namespace kv {

struct Block;

// Ranks blocks for eviction. The table tells it what happens to blocks; it never changes them.
//
// A block may go only while it is evictable: no resident child, not leased, not being read or
// written. The table reports each change of that, and never evicts any other block.
class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;
  virtual void on_insert(Block& block) = 0;  // first part reserved
  virtual void on_hit(Block& block) = 0;     // matched, acquired, or put again
  virtual void on_remove(Block& block) = 0;  // leaves the table; must be forgotten
  virtual void on_evictable(Block& block, bool evictable) = 0;
  virtual Block* victim() = 0;  // the next to go among the evictable, or null
};

// Least recently used, and a child before its parent: a prefix is worth nothing without its head,
// so only leaves go. A parent whose last child went competes with the time it was last used itself.
class PrefixLru final : public EvictionPolicy {
 public:
  void on_insert(Block& block) override;
  void on_hit(Block& block) override;
  void on_remove(Block& block) override;
  void on_evictable(Block& block, bool evictable) override;
  Block* victim() override;

 private:
  uint64_t tick_ = 0;
  std::set<std::pair<uint64_t, Block*>> leaves_;  // by last use
};

}  // namespace kv
