#include "node/host/feed.h"

#include "disk/tier.h"

namespace kv {
namespace {

constexpr int kTables = 2;

}  // namespace

int Feed::offer(size_t most) {
  if (ready_.get() < 0)
    if (const int error = ready_.open()) return error;
  most_ = most;
  return 0;
}

void Feed::changed(const BlockKey& key) {
  if (most_ == 0 || !queued_.insert(key).second) return;
  if (queue_.size() >= most_) return lose();
  queue_.push_back(key);
  ready_.signal();
}

void Feed::lose() {
  if (most_ == 0) return;
  queue_.clear();
  queued_.clear();
  lost_ = true;
  ready_.signal();
}

void Feed::restart() {
  sweeping_ = kTables;
  sweep_ = {};
  ready_.signal();
}

Feed::Taken Feed::take() {
  ready_.clear();
  if (queue_.empty() && sweeping_ != 0) sweep();
  Taken taken{{}, std::exchange(lost_, false)};
  while (!queue_.empty() && taken.changes.size() < kMaxTaken) {
    queued_.erase(queue_.front());
    tell(queue_.front(), taken.changes);
    queue_.pop_front();
  }
  if (!queue_.empty() || sweeping_ != 0) ready_.signal();
  return taken;
}

// Queues some more of what there is.
void Feed::sweep() {
  std::vector<BlockKey> keys;
  while (sweeping_ != 0 && keys.empty()) {
    const bool in_memory = sweeping_ == kTables;
    const bool more = in_memory                ? state_.table.next_keys(sweep_, keys)
                      : state_.disk != nullptr ? state_.disk->next_keys(sweep_, keys)
                                               : false;
    if (!more) --sweeping_, sweep_ = {};
  }
  for (const BlockKey& key : keys)
    if (queued_.insert(key).second) queue_.push_back(key);
}

void Feed::tell(const BlockKey& key, std::vector<BlockChange>& changes) const {
  for (const Manifest& manifest : state_.registry.manifests()) {
    if (manifest.spec_id != key.spec_id) continue;
    const Block* const block = state_.table.find_complete(key, manifest.part_ids);
    const bool on_disk =
        block == nullptr && state_.disk != nullptr && state_.disk->has(key, manifest.part_ids);
    const auto parent = block != nullptr ? block->parent
                        : on_disk        ? state_.disk->parent_of(key)
                                         : std::nullopt;
    changes.push_back({block != nullptr || on_disk, block != nullptr,
                       std::string(state_.options.tenants.name(manifest.tenant)), manifest.digest,
                       key.hash,
                       parent ? std::optional(parent->hash) : std::nullopt});
  }
}

}  // namespace kv
