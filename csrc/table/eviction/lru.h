// Least recently used, and a child before its parent.
#pragma once

#include <set>

#include "table/eviction/policy.h"

namespace kv {

// A prefix is useless without its head, so only leaves are evicted. A parent without children
// competes with its own last use.
class PrefixLru final : public EvictionPolicy {
 public:
  void on_insert(Block& block, const Block* parent) override;
  void on_hit(Block& block) override;
  void on_remove(Block& block) override;
  void on_evictable(Block& block, bool evictable) override;
  Block* victim() override;

 private:
  uint64_t tick_ = 0;
  std::set<std::pair<uint64_t, Block*>> leaves_;  // by last use
};

}  // namespace kv
