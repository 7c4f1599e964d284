// Slots in a pool: runs of granules, found in a bitmap, each with a generation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace kv {

struct Slot {
  uint64_t offset = 0;  // in the pool, a multiple of the granule
  uint64_t bytes = 0;   // as asked for; the slot has them rounded up to granules
  uint32_t generation = 0;
  uint32_t tenant = 0;  // whose it is; the table's business, not the slab's
};

// Hands out slots of a pool it never touches. First fit; not thread-safe.
//
// Invariants: granules of living slots are disjoint; a granule that begins a slot gets another
// generation each time it does; a request that cannot be met is refused without a search if nothing
// that could meet it has been freed since the last one was refused.
class Slab {
 public:
  Slab(uint64_t pool_bytes, uint32_t granule_bytes);

  // A slot of at least `bytes` > 0, or nothing.
  std::optional<Slot> allocate(uint64_t bytes);
  void release(const Slot& slot);

  uint64_t pool_bytes() const { return granules_ * granule_bytes_; }
  uint64_t free_bytes() const { return free_granules_ * granule_bytes_; }
  // What a slot of so many bytes takes up.
  uint64_t rounded(uint64_t bytes) const { return granules_of(bytes) * granule_bytes_; }
  uint64_t granules_of(uint64_t bytes) const {
    return (bytes + granule_bytes_ - 1) / granule_bytes_;
  }

 private:
  bool is_free(uint64_t granule) const { return (words_[granule / 64] >> (granule % 64)) & 1; }
  uint64_t next_free(uint64_t granule) const;
  uint64_t next_used(uint64_t granule, uint64_t limit) const;
  std::optional<uint64_t> find(uint64_t count, uint64_t from, uint64_t to) const;
  void mark(uint64_t first, uint64_t count, bool free);
  uint64_t free_run_around(uint64_t first, uint64_t count, uint64_t& begin) const;

  uint64_t granule_bytes_;
  uint64_t granules_;
  uint64_t free_granules_;
  uint64_t cursor_ = 0;          // where the last search ended
  uint64_t too_long_;            // no free run has this length or more
  std::vector<uint64_t> words_;  // 1 = free
  std::vector<uint32_t> generations_;
};

}  // namespace kv
