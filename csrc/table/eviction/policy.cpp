#include "table/eviction/policy.h"

#include <set>

#include "table/eviction/density.h"

namespace kv {
namespace {

// Least recently used, and a child before its parent: a prefix is useless without its head, so only
// leaves are evicted. A parent without children competes with its own last use.
class PrefixLru final : public EvictionPolicy {
 public:
  void on_insert(Block& block, const Block*) override { block.last_use = ++tick_; }
  void on_hit(Block& block) override {
    // Only leaves are in the set: a hit on a long prefix moves one of them.
    if (block.evictable) leaves_.erase({block.last_use, &block});
    block.last_use = ++tick_;
    if (block.evictable) leaves_.emplace(block.last_use, &block);
  }
  void on_remove(Block& block) override { leaves_.erase({block.last_use, &block}); }
  void on_evictable(Block& block, bool evictable) override {
    if (evictable) leaves_.emplace(block.last_use, &block);
    else leaves_.erase({block.last_use, &block});
  }
  Block* victim() override { return leaves_.empty() ? nullptr : leaves_.begin()->second; }

 private:
  uint64_t tick_ = 0;
  std::set<std::pair<uint64_t, Block*>> leaves_;  // by last use
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_eviction_policy(std::string_view name) {
  if (name == "density") return std::make_unique<ReuseDensity>();
  if (name == "density-seconds")
    return std::make_unique<ReuseDensity>(ReuseDensity::Objective::kSeconds);
  if (name == "lru") return std::make_unique<PrefixLru>();
  return nullptr;
}

}  // namespace kv
