#include "s3_fifo.h"

#include <algorithm>

#include "table.h"

namespace kv {
namespace {

constexpr uint8_t kMostUses = 3;
constexpr uint8_t kUsesToStay = 2;
constexpr size_t kSmallShare = 10;  // the small queue has one block in so many

}  // namespace

void S3Fifo::on_insert(Block& block, const Block*) {
  block.uses = 0;
  block.last_use = ++tick_;
  block.kind = gone_count_.contains(BlockKeyHash()(block.key)) ? kMain : kSmall;
  ++blocks_[block.kind];
}

void S3Fifo::on_hit(Block& block) { block.uses = std::min<uint8_t>(block.uses + 1, kMostUses); }

void S3Fifo::on_remove(Block& block) {
  --blocks_[block.kind];
  leaves_[block.kind].erase({block.last_use, &block});
  if (block.kind == kSmall) remember(BlockKeyHash()(block.key));
}

void S3Fifo::remember(uint64_t id) {
  gone_.push_back(id);
  ++gone_count_[id];
  while (gone_.size() > blocks_[kSmall] + blocks_[kMain]) {
    const auto oldest = gone_count_.find(gone_.front());
    if (--oldest->second == 0) gone_count_.erase(oldest);
    gone_.pop_front();
  }
}

void S3Fifo::on_evictable(Block& block, bool evictable) {
  if (evictable) leaves_[block.kind].emplace(block.last_use, &block);
  else leaves_[block.kind].erase({block.last_use, &block});
}

void S3Fifo::move_to_main(Block& block) {
  leaves_[block.kind].erase({block.last_use, &block});
  --blocks_[block.kind];
  ++blocks_[kMain];
  block.kind = kMain;
  block.last_use = ++tick_;
  leaves_[kMain].emplace(block.last_use, &block);
}

Block* S3Fifo::victim() {
  for (;;) {
    const bool small_is_full = blocks_[kSmall] * kSmallShare > blocks_[kSmall] + blocks_[kMain];
    const bool from_small = !leaves_[kSmall].empty() && (small_is_full || leaves_[kMain].empty());
    const auto& leaves = leaves_[from_small ? kSmall : kMain];
    if (leaves.empty()) return nullptr;
    Block& block = *leaves.begin()->second;
    if (block.uses < (from_small ? kUsesToStay : 1)) return &block;
    block.uses = from_small ? 0 : static_cast<uint8_t>(block.uses - 1);
    move_to_main(block);
  }
}

}  // namespace kv
