#include "disk/index.h"

#include <algorithm>

namespace kv {
namespace {

// At most this share is kept free, so that a write need not wait until a DELETE is durable.
constexpr uint64_t kAheadShare = 16;
constexpr uint64_t kAheadBytes = 64u << 20;
// As in the pool (table/table.cpp).
constexpr uint64_t kEvictFactor = 16;
constexpr uint64_t kEvictBytes = 64u << 20;
constexpr size_t kCompactBlocks = 4096;  // in one slice
constexpr uint64_t kCompactBacklogBytes = 4u << 20;

}  // namespace

DiskIndex::DiskIndex(const DiskGeometry& geometry, std::string_view eviction, DiskJournal& journal)
    : geometry_(geometry), journal_(journal), slab_(geometry.data_bytes, geometry.granule_bytes),
      table_(slab_, Quotas(eviction), this) {
  const uint64_t last = slab_.pool_bytes() - geometry.granule_bytes;
  scratch_ = slab_.claim(last, geometry.granule_bytes).value_or(Slot{});
}

bool DiskIndex::name_spec(uint32_t spec_id, std::string_view tenant, const Hash& digest) {
  uint32_t& number = spec_numbers_[spec_id];
  if (number == 0) number = journal_.spec_number(tenant, digest);
  return number != 0;
}

bool DiskIndex::name_part(uint32_t spec_id, uint32_t part_id, const Hash& digest, uint64_t bytes) {
  const auto spec = spec_numbers_.find(spec_id);
  if (spec == spec_numbers_.end() || spec->second == 0) return false;
  uint32_t& number = part_numbers_[part_id];
  if (number == 0) number = journal_.part_number(spec->second, digest, bytes);
  return number != 0;
}

bool DiskIndex::named(uint32_t spec_id, uint32_t part_id) const {
  const auto spec = spec_numbers_.find(spec_id);
  const auto part = part_numbers_.find(part_id);
  return spec != spec_numbers_.end() && spec->second != 0 && part != part_numbers_.end() &&
         part->second != 0;
}

uint64_t DiskIndex::restore(const DiskContents& found) {
  for (const DiskSpec& spec : found.specs) spec_numbers_[spec.number] = spec.number;
  for (const DiskPart& part : found.parts) part_numbers_[part.number] = part.number;
  // In the order in which they were written: parents first, and policies learn their age.
  std::vector<const DiskEntry*> entries;
  entries.reserve(found.entries.size());
  for (const auto& [offset, entry] : found.entries) entries.push_back(&entry);
  std::sort(entries.begin(), entries.end(),
            [](const DiskEntry* a, const DiskEntry* b) { return a->sequence < b->sequence; });
  for (const DiskEntry* entry : entries)
    if (!restore_one(*entry)) journal_.remove(entry->spec, entry->hash, entry->part);
  return parts_;
}

bool DiskIndex::restore_one(const DiskEntry& entry) {
  const std::optional<Slot> extent = slab_.claim(entry.offset, entry.bytes);
  if (!extent) return false;
  std::optional<BlockKey> parent;
  if (entry.parent) parent = BlockKey{entry.spec, *entry.parent};
  const Part part{entry.part, entry.crc, 0, *extent, entry.sequence};
  if (!table_.restore({entry.spec, entry.hash}, parent, part)) {
    slab_.release(*extent);
    return false;
  }
  ++parts_;
  return true;
}

const Part* DiskIndex::find(const BlockKey& key, uint32_t part_id) {
  Block* block = table_.find(key);
  const Part* part = block == nullptr ? nullptr : block->find(part_id);
  return part != nullptr && part->committed() ? part : nullptr;
}

void DiskIndex::touch(const BlockKey& key) {
  if (Block* block = table_.find(key)) table_.touch(*block);
}

DiskIndex::Room DiskIndex::reserve(const BlockKey& key, const std::optional<BlockKey>& parent,
                                   const Part& part, Slot& extent) {
  if (!named(key.spec_id, part.part_id)) return Room::kNever;
  const uint64_t bytes = part.slot.bytes;
  const Table::Reserved reserved = table_.reserve(key, parent, part.part_id, bytes, kWriter);
  switch (reserved.status) {
    case BlockStatus::kGranted: break;
    case BlockStatus::kExists: return Room::kExists;
    case BlockStatus::kBusy: return Room::kBusy;
    default: return make_room(parent, extent_bytes(bytes));
  }
  extent = reserved.slot;
  evicted_in_vain_ = 0;
  evict_ahead();
  return Room::kGranted;
}

DiskIndex::Room DiskIndex::make_room(const std::optional<BlockKey>& parent, uint64_t bytes) {
  if (bytes > slab_.pool_bytes()) return Room::kNever;
  // The extents that will become free may suffice.
  if (freed_bytes_ >= bytes) return Room::kLater;
  if (evicted_in_vain_ > kEvictFactor * bytes + kEvictBytes) {
    evicted_in_vain_ = 0;
    return Room::kNever;
  }
  // Pin the parent: its child is not in the table yet.
  Block* above = parent ? table_.find(*parent) : nullptr;
  if (above != nullptr) table_.pin(*above);
  evicted_in_vain_ += table_.evict(bytes - freed_bytes_);
  if (above != nullptr) table_.unpin(*above);
  return freed_.empty() ? Room::kNever : Room::kLater;
}

void DiskIndex::evict_ahead() {
  const uint64_t wanted = std::min(kAheadBytes, slab_.pool_bytes() / kAheadShare);
  const uint64_t free = slab_.free_bytes() + freed_bytes_;
  if (free < wanted) table_.evict(wanted - free);
}

uint64_t DiskIndex::record(const BlockKey& key, uint32_t part_id, uint32_t generation,
                           uint32_t crc) {
  Block* block = table_.find(key);
  Part* part = block == nullptr ? nullptr : block->find(part_id);
  if (part == nullptr || part->committed()) return 0;
  part->crc = crc;
  std::optional<DiskEntry> entry = entry_of(*block, *part);
  const uint64_t sequence = entry ? journal_.put(std::move(*entry)) : 0;
  if (sequence == 0) return 0;
  part->sequence = sequence;
  undurable_.push_back(sequence);
  ++parts_;
  table_.commit(key, part_id, kWriter, generation, crc);
  return sequence;
}

bool DiskIndex::may_record() const {
  return journal_.error() == 0 && journal_.backlog_bytes() <= DiskJournal::kMaxBacklogBytes &&
         journal_.snapshot_backlog_bytes() <= DiskJournal::kMaxBacklogBytes;
}

void DiskIndex::give_up(const BlockKey& key, uint32_t part_id) {
  if (const auto extent = table_.take_back(key, part_id, kWriter, std::nullopt))
    table_.release(*extent);
}

std::optional<DiskEntry> DiskIndex::entry_of(const Block& block, const Part& part) const {
  const auto spec = spec_numbers_.find(block.key.spec_id);
  const auto number = part_numbers_.find(part.part_id);
  if (spec == spec_numbers_.end() || number == part_numbers_.end()) return std::nullopt;
  std::optional<Hash> parent;
  if (block.parent) parent = block.parent->hash;
  return DiskEntry{spec->second,     number->second,  block.key.hash, parent,
                   part.slot.offset, part.slot.bytes, part.crc,       part.sequence};
}

void DiskIndex::on_leave(const Block& block) {
  parts_ -= block.parts.size();
  if (left_) left_(block.key);
  const auto spec = spec_numbers_.find(block.key.spec_id);
  if (spec != spec_numbers_.end()) journal_.remove(spec->second, block.key.hash, std::nullopt);
}

void DiskIndex::on_free(const Block& block) {
  for (const Part& part : block.parts) {
    freed_.push_back({journal_.appended(), part.slot});
    freed_bytes_ += extent_bytes(part.slot.bytes);
  }
}

void DiskIndex::advance() {
  const uint64_t durable = journal_.durable();
  for (; !freed_.empty() && freed_.front().sequence <= durable; freed_.pop_front()) {
    freed_bytes_ -= extent_bytes(freed_.front().extent.bytes);
    table_.release(freed_.front().extent);
  }
  while (!undurable_.empty() && undurable_.front() <= durable) undurable_.pop_front();
}

bool DiskIndex::compact(bool begin) {
  if (!compacting_) {
    if (!begin || !(journal_.compaction_due(parts_) || journal_.error() != 0)) return false;
    if (!journal_.begin_compaction()) return false;
    compacting_ = true;
    to_compact_.reserve(table_.blocks());
    table_.for_each([this](const Block& block) { to_compact_.push_back(block.key); });
  }
  if (journal_.snapshot_backlog_bytes() > kCompactBacklogBytes) return false;
  for (size_t i = 0; i < kCompactBlocks && !to_compact_.empty(); ++i) {
    const Block* block = table_.find(to_compact_.back());
    to_compact_.pop_back();
    if (block == nullptr) continue;
    for (const Part& part : block->parts)
      if (const auto entry = part.committed() ? entry_of(*block, part) : std::nullopt)
        journal_.snapshot(*entry);
  }
  if (!to_compact_.empty()) return true;
  to_compact_.shrink_to_fit();
  journal_.end_snapshot();
  compacting_ = false;
  return false;
}

}  // namespace kv
