// S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023).
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <set>
#include <unordered_map>
#include <utility>

#include "eviction.h"

namespace kv {

// New blocks enter a small queue, a tenth of all; those used twice there move on to the main queue,
// the others go and are remembered: if they come back, it is to the main queue. Only evictable
// blocks can go, so each queue is looked through from its oldest evictable block on.
class S3Fifo final : public EvictionPolicy {
 public:
  void on_insert(Block& block, const Block* parent) override;
  void on_hit(Block& block) override;
  void on_remove(Block& block) override;
  void on_evictable(Block& block, bool evictable) override;
  Block* victim() override;

 private:
  enum Queue : uint8_t { kSmall, kMain };
  void move_to_main(Block& block);
  void remember(uint64_t id);

  uint64_t tick_ = 0;
  std::set<std::pair<uint64_t, Block*>> leaves_[2];  // by entry into the queue
  size_t blocks_[2] = {0, 0};
  std::deque<uint64_t> gone_;  // hashed names, oldest first
  std::unordered_map<uint64_t, uint32_t> gone_count_;
};

}  // namespace kv
