// Which holder (an engine, by number) has which block: the low 64 bits of a block hash -> set of
// holders. Open addressing with linear probing, bounded; a clock hand evicts blocks not used
// lately. One thread at a time.
#pragma once

#include <memory>
#include <vector>

namespace kv {

inline constexpr unsigned kMaxHolders = 127;
inline constexpr size_t kHashBytes32 = 32;

// A set of holders. Bit 127 is not a holder: it marks an entry used since the hand passed.
struct HolderSet {
  uint64_t low = 0;
  uint64_t high = 0;

  static HolderSet of(unsigned holder) {
    return holder < 64 ? HolderSet{1ull << holder, 0} : HolderSet{0, 1ull << (holder - 64)};
  }
  bool empty() const { return (low | high) == 0; }
  HolderSet operator&(const HolderSet& other) const { return {low & other.low, high & other.high}; }
  HolderSet operator|(const HolderSet& other) const { return {low | other.low, high | other.high}; }
  HolderSet operator~() const { return {~low, ~high}; }
};

struct HolderRun {
  unsigned holder;
  size_t blocks;
};

class PrefixTable {
 public:
  // Remembers at most `max_blocks` blocks, with 36 to 72 bytes for each.
  explicit PrefixTable(size_t max_blocks);

  // `holder` (below kMaxHolders) has these blocks.
  void store(unsigned holder, const uint64_t* ids, size_t count);
  // The same for blocks given by their 32-byte hashes.
  void store_hashes(unsigned holder, const uint8_t* hashes, size_t count);
  // `holder` does not have these blocks any more; those it never had are ignored.
  void remove(unsigned holder, const uint64_t* ids, size_t count);
  // Leading blocks of the chain that each holder has; those with none are absent.
  std::vector<HolderRun> match(const uint8_t* hashes, size_t count);
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
  size_t slots() const { return mask_ + 1; }
  // Blocks forgotten because of `max_blocks`.
  size_t evicted() const { return evicted_; }
  size_t memory_bytes() const { return slots() * sizeof(Entry); }

 private:
  struct Entry {
    uint64_t id;  // 0: empty (the id 0 is kept as 1)
    HolderSet holders;
  };

  size_t place(uint64_t id) const;
  size_t find(uint64_t id) const;  // its slot, or the empty one for it
  template <class IdAt> void store_all(unsigned holder, size_t count, IdAt id_of);
  void add(uint64_t id, HolderSet holder);
  void erase(size_t slot);
  void evict();

  struct Unmap {
    size_t bytes;
    void operator()(Entry* entries) const;
  };
  std::unique_ptr<Entry[], Unmap> entries_;
  size_t mask_;
  size_t max_blocks_;
  size_t size_ = 0;
  size_t evicted_ = 0;
  size_t hand_ = 0;    // the next slot of the clock hand
  HolderSet live_;     // holders that match() may return
  HolderSet retired_;  // holders that may still be in entries
  HolderSet dying_;    // those of them that the current sweep removes
  size_t swept_ = 0;   // slots that it has visited
};

}  // namespace kv
