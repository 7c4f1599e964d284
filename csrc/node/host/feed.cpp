#include "node/host/feed.h"

#include <algorithm>

#include "disk/tier.h"

namespace kv {
namespace {

constexpr int kTables = 2;

}  // namespace

void Feed::changed(const BlockKey& key) {
  if (!queued_.insert(key).second) return;
  if (queue_.size() >= most_) return lose();
  queue_.push_back(key);
  ready_.signal();
}

void Feed::lose() {
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
  Taken taken;
  taken.lost = std::exchange(lost_, false);
  while (!queue_.empty() && taken.changes.size() < kMaxTaken) {
    queued_.erase(queue_.front());
    tell(queue_.front(), taken.changes);
    queue_.pop_front();
  }
  taken.more = !queue_.empty() || sweeping_ != 0;
  if (taken.more) ready_.signal();
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

int Feeds::offer(size_t most) {
  if (all_.emplace_back(state_, most).open() != 0) {
    all_.pop_back();
    return -1;
  }
  return all_.back().ready_fd();
}

Feed* Feeds::find(int descriptor) {
  const auto found = std::ranges::find(all_, descriptor, &Feed::ready_fd);
  return found == all_.end() ? nullptr : &*found;
}

}  // namespace kv
