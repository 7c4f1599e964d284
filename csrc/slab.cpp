#include "slab.h"

#include <algorithm>
#include <bit>

namespace kv {

Slab::Slab(uint64_t pool_bytes, uint32_t granule_bytes)
    : granule_bytes_(granule_bytes),
      granules_(pool_bytes / granule_bytes),
      free_granules_(granules_),
      too_long_(granules_ + 1),
      words_((granules_ + 63) / 64, 0),
      generations_(granules_, 0) {
  mark(0, granules_, true);
}

std::optional<Slot> Slab::allocate(uint64_t bytes) {
  const uint64_t count = granules_of(bytes);
  if (count == 0 || count > free_granules_ || count >= too_long_) return std::nullopt;
  std::optional<uint64_t> first = find(count, cursor_, granules_);
  // A run that begins before the cursor may go on behind it.
  if (!first) first = find(count, 0, std::min(granules_, cursor_ + count - 1));
  if (!first) {
    too_long_ = count;
    return std::nullopt;
  }
  mark(*first, count, false);
  free_granules_ -= count;
  cursor_ = *first + count == granules_ ? 0 : *first + count;
  return Slot{*first * granule_bytes_, bytes, ++generations_[*first], 0};
}

void Slab::release(const Slot& slot) {
  const uint64_t first = slot.offset / granule_bytes_;
  const uint64_t count = granules_of(slot.bytes);
  mark(first, count, true);
  free_granules_ += count;
  uint64_t begin = first;
  const uint64_t run = free_run_around(first, count, begin);
  if (run >= too_long_) {
    // The search for what could not be met before starts where it now can be.
    too_long_ = granules_ + 1;
    cursor_ = begin;
  }
}

// The first free granule at or after `granule`, or granules_.
uint64_t Slab::next_free(uint64_t granule) const {
  if (granule >= granules_) return granules_;
  uint64_t index = granule / 64;
  uint64_t word = words_[index] & (~uint64_t{0} << (granule % 64));
  while (word == 0) {
    if (++index == words_.size()) return granules_;
    word = words_[index];
  }
  return index * 64 + static_cast<uint64_t>(std::countr_zero(word));
}

// The first used granule at or after `granule`, or `limit` if there is none before it.
uint64_t Slab::next_used(uint64_t granule, uint64_t limit) const {
  uint64_t index = granule / 64;
  uint64_t word = ~words_[index] & (~uint64_t{0} << (granule % 64));
  while (word == 0) {
    if (++index * 64 >= limit) return limit;
    word = ~words_[index];
  }
  return std::min(limit, index * 64 + static_cast<uint64_t>(std::countr_zero(word)));
}

std::optional<uint64_t> Slab::find(uint64_t count, uint64_t from, uint64_t to) const {
  while (true) {
    const uint64_t first = next_free(from);
    if (first >= to || count > to - first) return std::nullopt;
    const uint64_t end = next_used(first, first + count);
    if (end - first >= count) return first;
    from = end;
  }
}

void Slab::mark(uint64_t first, uint64_t count, bool free) {
  while (count != 0) {
    const uint64_t bit = first % 64;
    const uint64_t taken = std::min<uint64_t>(count, 64 - bit);
    const uint64_t ones = taken == 64 ? ~uint64_t{0} : (uint64_t{1} << taken) - 1;
    if (free) words_[first / 64] |= ones << bit;
    else words_[first / 64] &= ~(ones << bit);
    first += taken, count -= taken;
  }
}

// The length of the free run that holds the given free granules; as far as it matters here.
uint64_t Slab::free_run_around(uint64_t first, uint64_t count, uint64_t& begin) const {
  const uint64_t enough = too_long_;
  if (enough > granules_) return count;
  uint64_t run = count;
  for (uint64_t at = first + count; run < enough && at < granules_ && is_free(at); ++at) ++run;
  for (; run < enough && begin > 0 && is_free(begin - 1); --begin) ++run;
  return run;
}

}  // namespace kv
