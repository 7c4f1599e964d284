#include "router/prefix_table.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>

namespace kv {

namespace {

constexpr HolderSet kUsed{0, 1ull << 63};
constexpr size_t kWrapped = 1024;  // no entry is so far from its place
constexpr size_t kAhead = 8;       // lookups that are prefetched

uint64_t id_at(const uint8_t* hashes, size_t block) {
  uint64_t id;
  std::memcpy(&id, hashes + block * kHashBytes32 + kHashBytes32 - sizeof id, sizeof id);
  if constexpr (std::endian::native == std::endian::little) id = __builtin_bswap64(id);
  return id;
}

void append_runs(std::vector<HolderRun>& runs, HolderSet holders, size_t blocks) {
  for (uint64_t bits = holders.low; bits != 0; bits &= bits - 1) {
    runs.push_back({static_cast<unsigned>(std::countr_zero(bits)), blocks});
  }
  for (uint64_t bits = holders.high; bits != 0; bits &= bits - 1) {
    runs.push_back({64u + static_cast<unsigned>(std::countr_zero(bits)), blocks});
  }
}

}  // namespace

PrefixTable::PrefixTable(size_t max_blocks)
    : mask_(std::bit_ceil(max_blocks + max_blocks / 2 + 2) - 1), max_blocks_(max_blocks) {
  // Zeroed at the first touch. In huge pages, if possible: random lookups would miss the TLB.
  const size_t bytes = (mask_ + 1) * sizeof(Entry);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  madvise(memory, bytes, MADV_HUGEPAGE);
  entries_ = std::unique_ptr<Entry[], Unmap>(static_cast<Entry*>(memory), Unmap{bytes});
}

void PrefixTable::Unmap::operator()(Entry* entries) const { munmap(entries, bytes); }

// Ids are bits of SHA-256, but those of other engines may be anything: a multiplication mixes them.
size_t PrefixTable::place(uint64_t id) const {
  return static_cast<size_t>((id * 0x9e3779b97f4a7c15ull) >> 20) & mask_;
}

size_t PrefixTable::find(uint64_t id) const {
  size_t slot = place(id);
  while (entries_[slot].id != 0 && entries_[slot].id != id) slot = (slot + 1) & mask_;
  return slot;
}

void PrefixTable::add(uint64_t id, HolderSet holder) {
  id += id == 0;
  size_t slot = find(id);
  if (entries_[slot].id == 0) {
    if (size_ == max_blocks_) {
      evict();
      ++evicted_;
      slot = find(id);  // the eviction may have moved entries
    }
    entries_[slot] = {id, {}};
    ++size_;
  }
  entries_[slot].holders = entries_[slot].holders | holder | kUsed;
}

template <class IdAt> void PrefixTable::store_all(unsigned holder, size_t count, IdAt id_of) {
  const HolderSet set = HolderSet::of(holder);
  live_ = live_ | set;
  for (size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) __builtin_prefetch(&entries_[place(id_of(i + kAhead))]);
    add(id_of(i), set);
  }
}

void PrefixTable::store(unsigned holder, const uint64_t* ids, size_t count) {
  store_all(holder, count, [ids](size_t i) { return ids[i]; });
}

void PrefixTable::store_hashes(unsigned holder, const uint8_t* hashes, size_t count) {
  store_all(holder, count, [hashes](size_t i) { return id_at(hashes, i); });
}

void PrefixTable::remove(unsigned holder, const uint64_t* ids, size_t count) {
  const HolderSet keep = ~HolderSet::of(holder);
  for (size_t i = 0; i < count; ++i) {
    const uint64_t id = ids[i] + (ids[i] == 0);
    const size_t slot = find(id);
    if (entries_[slot].id == 0) continue;
    entries_[slot].holders = entries_[slot].holders & keep;
    if ((entries_[slot].holders & ~kUsed).empty()) erase(slot);
  }
}

std::vector<HolderRun> PrefixTable::match(const uint8_t* hashes, size_t count) {
  std::vector<HolderRun> runs;
  HolderSet left = live_;
  size_t block = 0;
  for (; block < count && !left.empty(); ++block) {
    if (block + kAhead < count) __builtin_prefetch(&entries_[place(id_at(hashes, block + kAhead))]);
    const uint64_t id = id_at(hashes, block);
    Entry& entry = entries_[find(id + (id == 0))];
    const HolderSet on = left & entry.holders;
    if (block > 0) append_runs(runs, left & ~on, block);
    if (!on.empty()) entry.holders = entry.holders | kUsed;
    left = on;
  }
  if (block > 0) append_runs(runs, left, block);
  return runs;
}

size_t PrefixTable::held(unsigned holder, size_t end, size_t max_slots,
                         std::vector<uint64_t>& ids) const {
  const HolderSet set = HolderSet::of(holder) & live_;
  end = std::min(end, slots());
  const size_t begin = end - std::min(end, max_slots);
  if (set.empty()) return 0;
  const auto look = [&](size_t from, size_t to) {
    for (size_t slot = to; slot-- > from;) {
      if (entries_[slot].id != 0 && !(entries_[slot].holders & set).empty()) {
        ids.push_back(entries_[slot].id);
      }
    }
  };
  look(begin, end);
  if (begin == 0) look(slots() - std::min<size_t>(slots(), kWrapped), slots());
  return begin;
}

// Backward shift: entries after the hole move towards their place; no tombstones are needed.
void PrefixTable::erase(size_t slot) {
  size_t next = slot;
  for (;;) {
    next = (next + 1) & mask_;
    if (entries_[next].id == 0) break;
    const size_t home = place(entries_[next].id);
    if (((next - home) & mask_) >= ((next - slot) & mask_)) {
      // The current sweep may have passed `slot` but not `next`: it would miss this entry.
      entries_[slot] = {entries_[next].id, entries_[next].holders & ~dying_};
      slot = next;
    }
  }
  entries_[slot] = {};
  --size_;
}

void PrefixTable::evict() {
  for (;;) {
    Entry& entry = entries_[hand_];
    if (entry.id != 0) {
      if ((entry.holders & kUsed).empty()) return erase(hand_);  // another entry may move here
      entry.holders = entry.holders & ~kUsed;
    }
    hand_ = (hand_ + 1) & mask_;
  }
}

void PrefixTable::retire(unsigned holder) {
  const HolderSet set = HolderSet::of(holder);
  live_ = live_ & ~set;
  retired_ = retired_ | set;
}

bool PrefixTable::sweep(size_t max_slots) {
  if (swept_ == 0) dying_ = retired_;
  if (dying_.empty()) return true;
  const size_t end = std::min(slots(), swept_ + max_slots);
  while (swept_ < end) {
    Entry& entry = entries_[swept_];
    entry.holders = entry.holders & ~dying_;
    if (entry.id != 0 && (entry.holders & ~kUsed).empty()) erase(swept_);
    else ++swept_;  // after an erasure another entry may have moved here
  }
  if (swept_ < slots()) return false;
  retired_ = retired_ & ~dying_;
  dying_ = {};
  swept_ = 0;
  return true;
}

}  // namespace kv
