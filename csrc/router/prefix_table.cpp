#include "router/prefix_table.h"

#include <algorithm>

namespace kv {

namespace {

constexpr size_t kWrapped = 1024;  // no entry is so far from its place
constexpr size_t kAhead = 16;      // lookups that are prefetched
constexpr size_t kBatch = 32;      // lookups before the sets that they find are read

// Those of `left` that are not in `set` leave, and are appended with what they have.
void narrow(HolderGroup& left, HolderSet* set, size_t blocks, std::vector<HolderRun>& runs) {
  const uint32_t present = set != nullptr ? set->present : 0;
  const uint64_t* word = set != nullptr ? set->words() : nullptr;
  for (uint32_t words = present | left.present; words != 0; words &= words - 1) {
    const unsigned i = lowest(words);
    const uint64_t before = left.word(i), after = (present >> i & 1) != 0 ? before & *word++ : 0;
    if (after == before) continue;
    uint64_t gone = blocks != 0 ? before & ~after : 0;
    for (; gone != 0; gone &= gone - 1) runs.push_back({i * 64 + lowest(gone), blocks});
    left.assign(i, after);
  }
}

}  // namespace

PrefixTable::PrefixTable(size_t max_blocks)
    : max_blocks_(max_blocks), slots_(max_blocks + max_blocks / 2 + 2), sets_(max_blocks) {
  // Zeroed at the first touch. In huge pages, if possible: random lookups would miss the TLB.
  const size_t bytes = slots_ * sizeof(Entry);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  madvise(memory, bytes, MADV_HUGEPAGE);
  entries_ = std::unique_ptr<Entry[], Unmap>(static_cast<Entry*>(memory), Unmap{bytes});
}

// Ids are bits of SHA-256, but those of other engines may be anything: a multiplication mixes them.
size_t PrefixTable::place(uint64_t id) const {
  return static_cast<size_t>((id * 0x9e3779b97f4a7c15ull >> 32) * slots_ >> 32);
}

size_t PrefixTable::find(uint64_t id) const {
  size_t slot = place(id);
  while (entries_[slot].id != 0 && entries_[slot].id != id) slot = after(slot);
  return slot;
}

void PrefixTable::add(uint64_t id, unsigned holder) {
  size_t slot = find(id);
  if (entries_[slot].id == 0 && size_ == max_blocks_) {
    evict();
    slot = find(id);  // the eviction may have moved entries
  }
  HolderSet* set = set_at(slot);
  const bool room = sets_.change(set, holder, true);
  evicted_ += !room;
  if (!room) return;
  size_ += entries_[slot].id == 0;
  entries_[slot] = {id, reinterpret_cast<uintptr_t>(set) | kUsed};
}

// The block of `slot` has this set now, if there was room for it. False: it is gone.
bool PrefixTable::keep(size_t slot, bool room, HolderSet* set) {
  evicted_ += !room;
  if (room) entries_[slot].set = reinterpret_cast<uintptr_t>(set) | (entries_[slot].set & kUsed);
  if (room && set != nullptr) return true;
  erase(slot);
  return false;
}

void PrefixTable::store(unsigned holder, const std::vector<uint64_t>& ids) {
  live_.set(holder, true);
  for (size_t i = 0; i < ids.size(); ++i) {
    if (i + kAhead < ids.size()) __builtin_prefetch(&entries_[place(ids[i + kAhead])]);
    add(std::max<uint64_t>(ids[i], 1), holder);
  }
}

void PrefixTable::remove(unsigned holder, const std::vector<uint64_t>& ids) {
  for (const uint64_t id : ids) {
    const size_t slot = find(std::max<uint64_t>(id, 1));
    HolderSet* set = set_at(slot);
    if (set == nullptr) continue;
    const bool room = sets_.change(set, holder, false);
    keep(slot, room, set);
  }
}

std::vector<HolderRun> PrefixTable::match(const std::vector<uint64_t>& chain) {
  std::vector<HolderRun> runs;
  HolderGroup left = live_;
  std::array<size_t, kBatch> slots;
  size_t block = 0;
  HolderSet* last = nullptr;
  for (bool more = true; more && left.present != 0;) {
    size_t found = 0;
    for (; more && found < kBatch; found += more) {
      const size_t at = block + found;
      if (at + kAhead < chain.size()) __builtin_prefetch(&entries_[place(chain[at + kAhead])]);
      if (at < chain.size()) slots[found] = find(std::max<uint64_t>(chain[at], 1));
      more = at < chain.size() && entries_[slots[found]].id != 0;
      if (more) __builtin_prefetch(set_at(slots[found]));
    }
    for (size_t i = 0; i < found; ++i) {
      HolderSet* set = set_at(slots[i]);
      if (set != last) narrow(left, set, block, runs);
      last = set;
      if (left.present == 0) break;
      entries_[slots[i]].set |= kUsed;
      ++block;
    }
  }
  narrow(left, nullptr, block, runs);
  return runs;
}

size_t PrefixTable::held(unsigned holder, size_t end, size_t max_slots,
                         std::vector<uint64_t>& ids) const {
  end = std::min(end, slots());
  const size_t begin = end - std::min(end, max_slots);
  if (!live_.has(holder)) return 0;
  const auto look = [&](size_t from, size_t to) {
    for (size_t slot = to; slot-- > from;) {
      if (HolderSets::members(set_at(slot)).has(holder)) ids.push_back(entries_[slot].id);
    }
  };
  look(begin, end);
  if (begin == 0) look(slots() - std::min<size_t>(slots(), kWrapped), slots());
  return begin;
}

// Backward shift: entries after the hole move towards their place; no tombstones are needed.
void PrefixTable::erase(size_t slot) {
  sets_.release(set_at(slot));
  for (size_t next = after(slot); entries_[next].id != 0; next = after(next)) {
    if (distance(place(entries_[next].id), next) < distance(slot, next)) continue;
    // The current sweep has passed `slot` but not `next`: it would miss this entry.
    if (slot < swept_ && swept_ <= next) swept_ = slot;
    entries_[slot] = entries_[next];
    slot = next;
  }
  entries_[slot] = {};
  --size_;
}

void PrefixTable::evict() {
  ++evicted_;
  for (;; hand_ = after(hand_)) {
    Entry& entry = entries_[hand_];
    if (entry.id != 0 && (entry.set & kUsed) == 0) return erase(hand_);  // another may move here
    entry.set &= ~kUsed;
  }
}

void PrefixTable::retire(unsigned holder) {
  live_.set(holder, false);
  retired_.set(holder, true);
}

bool PrefixTable::sweep(size_t max_slots) {
  if (swept_ == 0) dying_ = retired_;
  if (dying_.present == 0) return true;
  for (size_t end = std::min(slots(), swept_ + max_slots); swept_ < end;) {
    HolderSet* set = set_at(swept_);
    HolderGroup left = HolderSets::members(set);
    const bool some = left.remove(dying_), room = !some || sets_.replace(set, left);
    if (!some || keep(swept_, room, set)) ++swept_;  // else another entry may have moved here
  }
  if (swept_ < slots()) return false;
  retired_.remove(dying_);
  dying_ = {};
  swept_ = 0;
  return true;
}

}  // namespace kv
