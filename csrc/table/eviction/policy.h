// Who goes when the pool is full: the seam.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

namespace kv {

struct Block;

// A place in a list that belongs to a policy.
struct EvictionLink {
  EvictionLink* older = nullptr;
  EvictionLink* newer = nullptr;
};

// What a policy keeps of a block. Its own business alone.
struct EvictionMark : EvictionLink {
  uint64_t last_use = 0;  // on the policy's own count of uses
  double last_use_s = 0;
  uint32_t depth = 0;  // blocks before it in its chain, as far as they were resident
  uint8_t uses = 0;
  uint8_t kind = 0;
};

// Ranks blocks for eviction. The table tells it what happens to blocks; it never changes them but
// for their EvictionMark.
//
// A block may go only while it is evictable: no resident child, not leased, not being read or
// written. The table reports each change of that, and never evicts any other block.
class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;
  // Seconds on a clock that never goes back, before what happens then.
  virtual void set_now(double) {}
  // First part reserved. `parent`: the block before it, if that is resident.
  virtual void on_insert(Block& block, const Block* parent) = 0;
  virtual void on_hit(Block& block) = 0;     // matched, acquired, or put again
  virtual void on_remove(Block& block) = 0;  // leaves the table; must be forgotten
  virtual void on_evictable(Block& block, bool evictable) = 0;
  virtual Block* victim() = 0;  // the next to go among the evictable, or null
};

// Names of all policies, the default first.
const std::vector<std::string_view>& eviction_policies();
// Null for an unknown name.
std::unique_ptr<EvictionPolicy> make_eviction_policy(std::string_view name);

}  // namespace kv
