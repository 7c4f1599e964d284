// Slots in a pool: runs of granules in a bitmap, each with a generation.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace kv {

struct Slot {
  uint64_t offset = 0;  // in the pool, a multiple of the granule
  uint64_t bytes = 0;   // as requested; the slot has whole granules
  uint32_t generation = 0;
  uint32_t tenant = 0;  // its owner; used by the table only
};

// Allocates slots of a pool that it never touches. First fit; not thread-safe.
//
// Invariants: the granules of allocated slots are disjoint; no two of the last 2^32 slots had the
// same generation; after a failure, requests of that size fail without a search until enough is
// free.
class Slab {
 public:
  static constexpr uint32_t kAnyRegion = UINT32_MAX;

  // `regions`: where each begins in the pool, in bytes, ascending from 0; each has the memory of a
  // NUMA node. Empty: the pool is not divided.
  Slab(uint64_t pool_bytes, uint32_t granule_bytes, const std::vector<uint64_t>& regions = {});

  // A slot of at least `bytes` > 0, or nothing. In `region` if that has room, else in the region
  // with the most, else across their borders: a divided pool holds what an undivided one would.
  std::optional<Slot> allocate(uint64_t bytes, uint32_t region = kAnyRegion);
  void release(const Slot& slot);
  // The slot of `bytes` > 0 at this offset, if all of it is free.
  std::optional<Slot> claim(uint64_t offset, uint64_t bytes);

  uint64_t pool_bytes() const { return granules_ * granule_bytes_; }
  uint64_t free_bytes() const { return whole_.free * granule_bytes_; }
  // The bytes that such a slot occupies.
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
  // Granules [begin, end).
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
