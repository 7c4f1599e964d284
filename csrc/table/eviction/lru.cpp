#include "table/eviction/lru.h"

#include "table/table.h"

namespace kv {

void PrefixLru::on_insert(Block& block, const Block*) { block.last_use = ++tick_; }

void PrefixLru::on_hit(Block& block) {
  // Only leaves are in the set: a hit on a long prefix moves one of them.
  if (block.evictable) leaves_.erase({block.last_use, &block});
  block.last_use = ++tick_;
  if (block.evictable) leaves_.emplace(block.last_use, &block);
}

void PrefixLru::on_remove(Block& block) { leaves_.erase({block.last_use, &block}); }

void PrefixLru::on_evictable(Block& block, bool evictable) {
  if (evictable) leaves_.emplace(block.last_use, &block);
  else leaves_.erase({block.last_use, &block});
}

Block* PrefixLru::victim() { return leaves_.empty() ? nullptr : leaves_.begin()->second; }

}  // namespace kv
