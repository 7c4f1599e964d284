#include "node/lookup.h"

#include "disk/tier.h"

namespace kv {

bool Lookup::find_next(Found& found, const BlockKey& key, const PartIds& parts, bool touch) {
  Block* const block = state_.table.find_complete(key, parts);
  if (block == nullptr && (state_.disk == nullptr || !state_.disk->has(key, parts))) return false;
  found.last = block;
  if (block != nullptr) {
    if (touch) state_.table.touch(*block);
    if (found.in_memory++ == found.blocks) ++found.leading_in_memory;
  }
  // Also if the block is in memory: else the disk would evict first what is used most.
  if (state_.disk != nullptr && touch) state_.disk->touch(key);
  ++found.blocks;
  return true;
}

bool Lookup::find_more(Found& found, const Manifest& manifest, HashSpan hashes, bool touch) {
  for (; found.blocks < hashes.count; state_.turn.spend(manifest.parts.size())) {
    if (state_.turn.over()) return false;
    const BlockKey key{manifest.spec_id, hashes[found.blocks]};
    if (!find_next(found, key, manifest.part_ids, touch)) break;
  }
  return true;
}

bool Lookup::find_missing(std::vector<uint32_t>& missing, uint32_t& next, const Manifest& manifest,
                          HashSpan hashes) {
  for (; next < hashes.count; ++next, state_.turn.spend(manifest.parts.size())) {
    if (state_.turn.over()) return false;
    Found found;
    const BlockKey key{manifest.spec_id, hashes[next]};
    if (!find_next(found, key, manifest.part_ids, false)) missing.push_back(next);
  }
  return true;
}

uint32_t Lookup::find_all(uint32_t spec_id, const PartIds& parts, HashSpan hashes) {
  Found found;
  while (found.blocks < hashes.count &&
         find_next(found, {spec_id, hashes[found.blocks]}, parts, false))
    continue;
  return found.blocks;
}

void Lookup::count(const Session& session, const Found& found, uint32_t asked) {
  TenantCounts& tenant = state_.counts_of(session);
  Counters& counters = state_.counters;
  tenant.hits += found.blocks;
  tenant.misses += asked - found.blocks;
  counters.hits[Tier::kMemory] += found.in_memory;
  counters.misses[Tier::kMemory] += asked - found.in_memory;
  if (state_.disk == nullptr) return;
  counters.hits[Tier::kDisk] += found.blocks - found.in_memory;
  counters.misses[Tier::kDisk] += asked - found.blocks;
}

void Lookup::count_remote(const Session& session, uint32_t found, size_t missing) {
  TenantCounts& tenant = state_.counts_of(session);
  tenant.hits += found;
  tenant.misses -= found;  // as which count() has counted them
  state_.counters.hits[Tier::kRemote] += found;
  state_.counters.misses[Tier::kRemote] += missing - found;
}

}  // namespace kv
