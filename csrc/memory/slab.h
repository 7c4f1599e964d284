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
// Invariants: granules of living slots are disjoint; no two of the last 2^32 slots had the same
// generation; a request that cannot be met is refused without a search if nothing
// that could meet it has been freed since the last one was refused.
class Slab {
 public:
  static constexpr uint32_t kAnyRegion = UINT32_MAX;

  // `regions`: where in the pool each begins, in bytes, ascending from 0 (a NUMA node's memory each).
  // None: the pool is not divided.
  Slab(uint64_t pool_bytes, uint32_t granule_bytes, const std::vector<uint64_t>& regions = {});

  // A slot of at least `bytes` > 0, or nothing. In `region` where that has room, else in the one with
  // the most, else across their borders: a divided pool holds whatever an undivided one would.
  std::optional<Slot> allocate(uint64_t bytes, uint32_t region = kAnyRegion);
  void release(const Slot& slot);
  // The slot of `bytes` > 0 at this offset, if all of it is free: for what is known to lie there.
  std::optional<Slot> claim(uint64_t offset, uint64_t bytes);

  uint64_t pool_bytes() const { return granules_ * granule_bytes_; }
  uint64_t free_bytes() const { return whole_.free * granule_bytes_; }
  // What a slot of so many bytes takes up.
  uint64_t rounded(uint64_t bytes) const { return granules_of(bytes) * granule_bytes_; }
  uint64_t granules_of(uint64_t bytes) const {
    return (bytes + granule_bytes_ - 1) / granule_bytes_;
  }
  size_t regions() const { return regions_.size(); }
  uint64_t used_bytes_of(size_t region) const {
    const Span& span = regions_[region];
    return (span.end - span.begin - span.free) * granule_bytes_;
  }

 private:
  // Granules [begin, end), and what is known of them.
  struct Span {
    Span(uint64_t from, uint64_t to)
        : begin(from), end(to), free(to - from), cursor(from), too_long(to - from + 1) {}
    uint64_t begin, end, free;
    uint64_t cursor;    // where the last search ended
    uint64_t too_long;  // no free run has this length or more
  };

  bool is_free(uint64_t granule) const { return (words_[granule / 64] >> (granule % 64)) & 1; }
  uint64_t next_free(uint64_t granule) const;
  uint64_t next_used(uint64_t granule, uint64_t limit) const;
  std::optional<uint64_t> find(uint64_t count, uint64_t from, uint64_t to) const;
  std::optional<uint64_t> search(Span& span, uint64_t count) const;
  std::optional<uint64_t> search_regions(uint64_t count, uint32_t first);
  Slot take(uint64_t first, uint64_t bytes);
  void mark(uint64_t first, uint64_t count, bool free);
  void freed(Span& span, uint64_t first, uint64_t count) const;
  uint64_t free_run_around(const Span& span, uint64_t first, uint64_t count, uint64_t& begin) const;

  uint64_t granule_bytes_;
  uint64_t granules_;
  Span whole_;
  std::vector<Span> regions_;    // empty where the pool is not divided
  std::vector<uint64_t> words_;  // 1 = free
  uint32_t last_generation_ = 0;
};

}  // namespace kv
