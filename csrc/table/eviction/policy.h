// Which block is evicted when the pool is full: the interface of policies.
#pragma once

#include <array>
#include <memory>
#include <string_view>

namespace kv {

struct Block;

// A place in a list of the policy.
struct EvictionLink {
  EvictionLink* older = nullptr;
  EvictionLink* newer = nullptr;
};

// What a policy keeps with a block. Nothing else uses it.
struct EvictionMark : EvictionLink {
  uint64_t last_use = 0;  // on the policy's count of uses
  double last_use_s = 0;
  uint32_t depth = 0;  // blocks before it in its chain, as far as they were resident
  uint8_t uses = 0;
  uint8_t kind = 0;
};

// Ranks blocks for eviction, as the table reports their use. It changes only their EvictionMark.
//
// A block is evictable while it has no resident child and is not leased, read or written. The table
// reports each change of that and evicts no other block.
class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;
  // The time of the following calls, in seconds on a clock that never goes back.
  virtual void set_now(double) {}
  // First part reserved. `parent`: the block before it, if that is resident.
  virtual void on_insert(Block& block, const Block* parent) = 0;
  virtual void on_hit(Block& block) = 0;     // matched, acquired, or put again
  virtual void on_remove(Block& block) = 0;  // leaves the table; must be forgotten
  virtual void on_evictable(Block& block, bool evictable) = 0;
  virtual Block* victim() = 0;  // the evictable block to evict next, or null
};

// Names of all policies, the default first. density-seconds: density for seconds of prefill.
inline constexpr std::array<std::string_view, 3> kEvictionPolicies{"density", "density-seconds",
                                                                   "lru"};
// Null for an unknown name.
std::unique_ptr<EvictionPolicy> make_eviction_policy(std::string_view name);

}  // namespace kv
