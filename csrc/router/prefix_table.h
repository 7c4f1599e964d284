// Which holder (an engine, by number) has which block: the low 64 bits of a block hash -> set of
// holders. Open addressing with linear probing, bounded; a clock hand evicts blocks not used
// lately. One thread at a time.
#pragma once

#include <sys/mman.h>

#include <memory>

#include "router/holder_sets.h"

namespace kv {

struct HolderRun {
  unsigned holder;
  size_t blocks;
};

class PrefixTable {
 public:
  // Remembers at most `max_blocks` blocks, with 49 bytes for each.
  explicit PrefixTable(size_t max_blocks);

  // `holder` (below kMaxHolders) has these blocks.
  void store(unsigned holder, const std::vector<uint64_t>& ids);
  // `holder` does not have these blocks any more; those it never had are ignored.
  void remove(unsigned holder, const std::vector<uint64_t>& ids);
  // Leading blocks of the chain that each holder has; those with none are absent.
  std::vector<HolderRun> match(const std::vector<uint64_t>& chain);
  // Forget all blocks of `holder`: matches ignore it at once. Its number must not be used again
  // before a whole sweep has removed it from the entries.
  void retire(unsigned holder);
  // Remove retired holders from at most `max_slots` slots. A sweep covers the holders that are
  // retired when it begins. Returns true when it has visited every slot: their numbers are free.
  bool sweep(size_t max_slots);

  // Append the ids of `holder`'s blocks in the `max_slots` slots below `end`; return where these
  // begin: 0 when there are no more. Downwards, since entries only move down: a caller that goes on
  // while the table changes misses no block that stays (except one that wraps from the beginning to
  // the end).
  size_t held(unsigned holder, size_t end, size_t max_slots, std::vector<uint64_t>& ids) const;

  size_t size() const { return size_; }
  size_t slots() const { return slots_; }
  // Blocks, or holders of a block, forgotten for lack of room.
  size_t evicted() const { return evicted_; }
  size_t memory_bytes() const { return entries_.get_deleter().bytes + sets_.memory_bytes(); }

 private:
  struct Entry {
    uint64_t id;    // 0: empty (the id 0 is kept as 1)
    uintptr_t set;  // HolderSet*, with kUsed
  };
  static constexpr uintptr_t kUsed = 1;  // since the hand passed

  size_t place(uint64_t id) const;
  size_t find(uint64_t id) const;  // its slot, or the empty one for it
  size_t after(size_t slot) const { return slot + 1 == slots_ ? 0 : slot + 1; }
  size_t distance(size_t from, size_t to) const { return to - from + (to < from ? slots_ : 0); }
  HolderSet* set_at(size_t slot) const {
    return reinterpret_cast<HolderSet*>(entries_[slot].set & ~kUsed);
  }
  void add(uint64_t id, unsigned holder);
  bool keep(size_t slot, bool room, HolderSet* set);
  void erase(size_t slot);
  void evict();

  struct Unmap {
    size_t bytes;
    void operator()(Entry* entries) const { munmap(entries, bytes); }
  };
  size_t max_blocks_;
  size_t slots_;
  std::unique_ptr<Entry[], Unmap> entries_;
  HolderSets sets_;
  size_t size_ = 0;
  size_t evicted_ = 0;
  size_t hand_ = 0;      // the next slot of the clock hand
  HolderGroup live_{};     // holders that match() may return
  HolderGroup retired_{};  // holders that may still be in entries
  HolderGroup dying_{};    // those of them that the current sweep removes
  size_t swept_ = 0;     // slots that it has visited
};

}  // namespace kv
