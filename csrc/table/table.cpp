#include "table/table.h"

#include <algorithm>
#include <utility>

namespace kv {
namespace {

// Eviction for one slot stops after so many bytes: the free memory is too scattered, and one block
// is not worth emptying the pool.
constexpr uint64_t kEvictFactor = 16;
constexpr uint64_t kEvictBytes = 64u << 20;
constexpr size_t kSweepBuckets = 64;  // in one call

bool before(const Part& part, uint32_t part_id) { return part.part_id < part_id; }

}  // namespace

Part* Block::find(uint32_t part_id) {
  const auto at = std::lower_bound(parts.begin(), parts.end(), part_id, before);
  return at != parts.end() && at->part_id == part_id ? &*at : nullptr;
}

Table::Table(Slab& slab, Quotas quotas, TableObserver* observer)
    : slab_(slab), quotas_(std::move(quotas)), observer_(observer) {}

Table::Reserved Table::reserve(const BlockKey& key, const std::optional<BlockKey>& parent,
                               uint32_t part_id, uint64_t bytes, uint64_t session,
                               uint32_t region) {
  Block* block = find(key);
  if (const Part* part = block == nullptr ? nullptr : block->find(part_id)) {
    if (!part->committed()) return {BlockStatus::kBusy, {}};
    touch(*block);
    return {BlockStatus::kExists, {}};
  }
  // In the table, and counted as being written, before room is made for it: then neither the block
  // nor its prefix can be evicted.
  if (block == nullptr) block = &insert(key, parent);
  ++block->reserved;
  refresh(*block);
  // It and its prefix are held from here on.
  const bool may = quotas_.within_limits(block->tenant, slab_.rounded(bytes));
  const std::optional<Slot> slot = may ? allocate(block->tenant, bytes, region) : std::nullopt;
  if (!slot) {
    --block->reserved;
    refresh(*block);
    drop_if_empty(*block);
    return {BlockStatus::kNoSpace, {}};
  }
  add(*block, Part{part_id, 0, session, *slot, 0});
  ++counts_.reserved_blocks;
  return {BlockStatus::kGranted, *slot};
}

BlockStatus Table::commit(const BlockKey& key, uint32_t part_id, uint64_t session,
                          uint32_t generation, uint32_t crc) {
  Block* const block = find(key);
  Part* const part = block == nullptr ? nullptr : block->find(part_id);
  if (part == nullptr || part->writer != session || part->slot.generation != generation) {
    const auto slot = take_superseded({key, part_id}, session, generation);
    if (slot) release(*slot);
    return slot ? BlockStatus::kExists : BlockStatus::kGone;
  }
  part->writer = 0;
  part->crc = crc;
  if (directory_ != nullptr) directory_->publish({key, part_id}, part->slot.offset, crc);
  --counts_.reserved_blocks;
  --block->reserved;
  refresh(*block);
  tell(*block);
  return BlockStatus::kOk;
}

std::optional<Slot> Table::take_back(const BlockKey& key, uint32_t part_id, uint64_t session,
                                     std::optional<uint32_t> generation) {
  Block* const found = find(key);
  Part* const part = found == nullptr ? nullptr : found->find(part_id);
  if (part == nullptr || part->writer != session ||
      (generation && part->slot.generation != *generation))
    return take_superseded({key, part_id}, session, generation);
  Block& block = *found;
  const Slot slot = part->slot;
  block.parts.erase(block.parts.begin() + (part - block.parts.data()));
  grow(block, 0 - slab_.rounded(slot.bytes));
  --counts_.reserved_blocks;
  --block.reserved;
  refresh(block);
  drop_if_empty(block);
  return slot;
}

bool Table::adopt(const BlockKey& key, const std::optional<BlockKey>& parent, uint32_t part_id,
                  const Slot& slot, uint32_t crc) {
  Block* block = find(key);
  Part* part = block == nullptr ? nullptr : block->find(part_id);
  if (part != nullptr && part->committed()) {
    touch(*block);
    return false;
  }
  const Part whole{part_id, crc, 0, slot, 0};
  if (part != nullptr) {
    superseded_.emplace(PartKey{key, part_id}, std::exchange(*part, whole));
    --counts_.reserved_blocks;
    --block->reserved;
  } else {
    if (block == nullptr) block = &insert(key, parent);
    add(*block, whole);
  }
  if (directory_ != nullptr) directory_->publish({key, part_id}, slot.offset, crc);
  refresh(*block);
  tell(*block);
  return true;
}

std::optional<Slot> Table::take_superseded(const PartKey& key, uint64_t session,
                                           std::optional<uint32_t> generation) {
  const auto [begin, end] = superseded_.equal_range(key);
  for (auto at = begin; at != end; ++at) {
    const Part& part = at->second;
    if (part.writer != session || (generation && part.slot.generation != *generation)) continue;
    const Slot slot = part.slot;
    superseded_.erase(at);
    return slot;
  }
  return std::nullopt;
}

std::optional<Slot> Table::lend(uint32_t tenant, uint64_t bytes, Block* next_to, uint32_t region) {
  if (next_to != nullptr) pin(*next_to);
  const std::optional<Slot> slot = allocate(tenant, bytes, region);
  if (next_to != nullptr) unpin(*next_to);
  return slot;
}

bool Table::restore(const BlockKey& key, const std::optional<BlockKey>& parent, const Part& part) {
  Block* block = find(key);
  if (block == nullptr) block = &insert(key, parent);
  if (block->find(part.part_id) != nullptr) return false;
  add(*block, part);
  quotas_.took(part.slot.tenant, slab_.rounded(part.slot.bytes));
  refresh(*block);
  return true;
}

Block* Table::find(const BlockKey& key) {
  const auto found = blocks_.find(key);
  return found == blocks_.end() ? nullptr : found->second.get();
}

Block* Table::find_complete(const BlockKey& key, const PartIds& parts) {
  Block* block = find(key);
  if (block == nullptr) return nullptr;
  for (const uint32_t part_id : parts) {
    const Part* part = block->find(part_id);
    if (part == nullptr || !part->committed()) return nullptr;
  }
  return block;
}

uint32_t Table::match(uint32_t spec_id, const PartIds& parts, HashSpan hashes) {
  uint32_t run = 0;
  while (run < hashes.count && find_complete({spec_id, hashes[run]}, parts) != nullptr) ++run;
  return run;
}

void Table::pin(Block& block) {
  if (block.pins++ == 0) ++counts_.pinned_blocks;
  ++quotas_.use(block.tenant).pins;
  refresh(block);
}

void Table::unpin(Block& block) {
  if (--block.pins == 0) --counts_.pinned_blocks;
  --quotas_.use(block.tenant).pins;
  if (block.resident) return refresh(block);
  if (block.pins != 0) return;
  if (quotas_.limited()) quotas_.hold(block.tenant, 0 - bytes_of(block.parts));
  discard(std::move(leaving_.extract(&block).mapped()));
}

bool Table::remove(const BlockKey& key) {
  Block* const block = find(key);
  if (block == nullptr || block->reserved == block->parts.size()) return false;
  remove_committed(*block);
  return true;
}

// Bucket by bucket; again from the first one after a rehash.
bool Table::next_keys(Sweep& sweep, std::vector<BlockKey>& keys) const {
  if (sweep.buckets != blocks_.bucket_count()) sweep = {0, blocks_.bucket_count()};
  const size_t end = std::min(sweep.bucket + kSweepBuckets, sweep.buckets);
  for (; sweep.bucket < end; ++sweep.bucket)
    for (auto at = blocks_.begin(sweep.bucket); at != blocks_.end(sweep.bucket); ++at)
      keys.push_back(at->first);
  return sweep.bucket < sweep.buckets;
}

// Parts being written move to a new block of the same name; readers keep the old one.
void Table::remove_committed(Block& block) {
  const auto first_writing = std::stable_partition(
      block.parts.begin(), block.parts.end(), [](const Part& part) { return part.committed(); });
  std::vector<Part> writing(first_writing, block.parts.end());
  block.parts.erase(first_writing, block.parts.end());
  grow(block, 0 - bytes_of(writing));
  const BlockKey key = block.key;
  const std::optional<BlockKey> parent = block.parent;
  discard(take_out(block));
  if (writing.empty()) return;
  Block& next = insert(key, parent);
  next.reserved = static_cast<uint32_t>(writing.size());
  next.parts = std::move(writing);
  grow(next, bytes_of(next.parts));
  refresh(next);
}

Block& Table::insert(const BlockKey& key, const std::optional<BlockKey>& parent) {
  auto made = std::make_unique<Block>();
  Block& block = *made;
  block.key = key;
  block.parent = parent;
  block.resident = true;
  block.tenant = quotas_.tenant_of(key.spec_id);
  block.policy = &quotas_.policy_of(block.tenant);
  ++quotas_.use(block.tenant).blocks;
  blocks_.emplace(key, std::move(made));
  if (const auto waiting = absent_.find(key); waiting != absent_.end()) {
    block.children = waiting->second.children;
    block.place = std::move(waiting->second.place);
    absent_.erase(waiting);
  } else {
    block.place = std::make_unique<ChainForest::Node>();
  }
  Block* const above = hang_on_parent(block);
  block.policy->on_insert(block, above);
  if (above != nullptr) ++above->children, refresh(*above);
  return block;
}

// Returns the parent if it is resident. A parent that is the block itself, or below it, is ignored.
Block* Table::hang_on_parent(Block& block) {
  if (!block.parent) return nullptr;
  Block* const above = find(*block.parent);
  if (above == &block ||
      (above != nullptr && block.children != 0 && forest_.has_root(*above->place, *block.place))) {
    block.parent.reset();
    return nullptr;
  }
  ChainForest::Node* place = above == nullptr ? nullptr : above->place.get();
  if (above == nullptr) {
    Absent& absent = absent_[*block.parent];
    if (absent.children++ == 0) absent.place = std::make_unique<ChainForest::Node>();
    place = absent.place.get();
  }
  quotas_.hold(block.tenant, forest_.hang(*block.place, *place));
  return above;
}

std::unique_ptr<Block> Table::take_out(Block& block) {
  auto found = blocks_.find(block.key);
  std::unique_ptr<Block> taken = std::move(found->second);
  blocks_.erase(found);
  block.policy->on_remove(block);
  --quotas_.use(block.tenant).blocks;
  withdraw(block);
  block.resident = block.evictable = false;
  if (observer_ != nullptr && !block.parts.empty()) observer_->on_leave(block);
  if (!block.parts.empty()) tell(block);
  settle_hold(block);
  grow(block, 0 - bytes_of(block.parts));
  leave_parent(block);
  if (block.children != 0) absent_[block.key] = {block.children, std::move(block.place)};
  block.place.reset();
  return taken;
}

void Table::leave_parent(Block& block) {
  if (!block.parent) return;
  quotas_.hold(block.tenant, forest_.cut(*block.place));
  if (Block* const above = find(*block.parent)) {
    --above->children;
    return refresh(*above);
  }
  const auto absent = absent_.find(*block.parent);
  if (--absent->second.children == 0) absent_.erase(absent);
}

// Releases the slots of a block that is out of the table, now or at its last unpin.
void Table::discard(std::unique_ptr<Block> block) {
  if (block->pins == 0 && read_in_place_ && read_in_place_(*block)) {
    pin(*block);
    kept_.push_back(block.get());
  }
  if (block->pins != 0) {
    Block* key = block.get();
    // Outside of its chain it holds its own bytes.
    if (quotas_.limited()) quotas_.hold(block->tenant, bytes_of(block->parts));
    leaving_.emplace(key, std::move(block));
    return;
  }
  if (observer_ != nullptr) return observer_->on_free(*block);
  for (const Part& part : block->parts) release(part.slot);
}

void Table::release(const Slot& slot) {
  quotas_.gave(slot.tenant, slab_.rounded(slot.bytes));
  slab_.release(slot);
}

void Table::add(Block& block, const Part& part) {
  const auto at = std::lower_bound(block.parts.begin(), block.parts.end(), part.part_id, before);
  block.parts.insert(at, part);
  grow(block, slab_.rounded(part.slot.bytes));
}

std::optional<Slot> Table::allocate(uint32_t tenant, uint64_t bytes, uint32_t region) {
  const uint64_t most = kEvictFactor * bytes + kEvictBytes;
  bool noted = false;
  for (uint64_t evicted = 0;;) {
    if (std::optional<Slot> slot = slab_.allocate(bytes, region)) {
      slot->tenant = tenant;
      quotas_.took(tenant, slab_.rounded(bytes));
      return slot;
    }
    if (observer_ == nullptr && !std::exchange(noted, true)) {
      if (before_eviction_) before_eviction_();
      recheck_kept();
      continue;
    }
    const bool may = observer_ == nullptr && evicted < most;
    Block* victim = may ? quotas_.victim(tenant, slab_.rounded(bytes)) : nullptr;
    if (victim == nullptr) return std::nullopt;
    if (!keep_if_read(*victim)) evicted += let_go(*victim);
  }
}

uint64_t Table::evict(uint64_t bytes) {
  uint64_t evicted = 0;
  while (evicted < bytes) {
    Block* victim = quotas_.victim(0, bytes);
    if (victim == nullptr) break;
    evicted += let_go(*victim);
  }
  return evicted;
}

// Returns the bytes of its slots.
uint64_t Table::let_go(Block& victim) {
  uint64_t bytes = 0;
  for (const Part& part : victim.parts) bytes += part.slot.bytes;
  ++quotas_.use(victim.tenant).evictions;
  ++counts_.evictions;
  discard(take_out(victim));
  return bytes;
}

void Table::publish(const Block& block) {
  for (const Part& part : block.parts)
    if (part.committed())
      directory_->publish({block.key, part.part_id}, part.slot.offset, part.crc);
}

void Table::withdraw(const Block& block) {
  if (directory_ == nullptr) return;
  for (const Part& part : block.parts) directory_->withdraw({block.key, part.part_id});
}

// A block that a client reads in place is not evicted.
bool Table::keep_if_read(Block& block) {
  if (!read_in_place_) return false;
  withdraw(block);
  if (!read_in_place_(block)) return false;
  publish(block);
  pin(block);
  kept_.push_back(&block);
  return true;
}

void Table::recheck_kept() {
  for (Block* block : std::exchange(kept_, {})) {
    if (read_in_place_(*block)) kept_.push_back(block);
    else unpin(*block);
  }
}

void Table::refresh(Block& block) {
  const bool evictable = block.resident && block.children == 0 && block.pins == 0 &&
                         block.reserved == 0 && !block.parts.empty();
  if (block.resident) settle_hold(block);
  if (evictable == block.evictable) return;
  block.evictable = evictable;
  block.policy->on_evictable(block, evictable);
}

void Table::drop_if_empty(Block& block) {
  if (block.parts.empty() && block.reserved == 0) discard(take_out(block));
}

uint64_t Table::bytes_of(const std::vector<Part>& parts) const {
  uint64_t bytes = 0;
  for (const Part& part : parts) bytes += slab_.rounded(part.slot.bytes);
  return bytes;
}

void Table::settle_hold(Block& block) {
  if (!quotas_.limited()) return;
  const bool holds = block.resident && (block.pins != 0 || block.reserved != 0);
  if (std::exchange(block.holds, holds) == holds) return;
  quotas_.hold(block.tenant,
               holds ? forest_.hold(*block.place) : forest_.let_go(*block.place));
}

// The block has `bytes` more; modulo 2^64.
void Table::grow(Block& block, uint64_t bytes) {
  if (quotas_.limited() && bytes != 0)
    quotas_.hold(block.tenant, forest_.grow(*block.place, bytes));
}

}  // namespace kv
