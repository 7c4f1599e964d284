#include "node/purge.h"

#include "disk/tier.h"

namespace kv {

bool forget(NodeState& state, const BlockKey& key, uint64_t& counter) {
  const bool on_disk = state.disk != nullptr && state.disk->remove(key);
  const bool in_memory = state.table.remove(key);
  counter += in_memory ? 1 : 0;
  return in_memory || on_disk;
}

Purge::Purge(NodeState& state, std::optional<uint32_t> tenant) : state_(&state) {
  if (tenant) specs_ = state.registry.specs_of(*tenant);
}

// Each block goes from both tiers at once. The memory is swept before the disk and after it: a
// block may have been brought from the disk meanwhile.
bool Purge::go_on() {
  DiskTier* const disk = state_->disk;
  const int tables = disk == nullptr ? 1 : 3;
  std::vector<BlockKey> keys;
  for (; tables_ < tables && !state_->turn.over(); state_->turn.spend(1 + keys.size())) {
    keys.clear();
    const bool more =
        tables_ == 1 ? disk->next_keys(sweep_, keys) : state_->table.next_keys(sweep_, keys);
    for (const BlockKey& key : keys)
      if (!specs_ || specs_->contains(key.spec_id))
        removed_ += forget(*state_, key, state_->counters.purged) ? 1 : 0;
    if (!more) ++tables_, sweep_ = {};
  }
  return tables_ == tables;
}

}  // namespace kv
