#include "memory/slab.h"

#include <algorithm>
#include <bit>
#include <numeric>

namespace kv {

namespace {

// The granules of a run that lie in [begin, end).
uint64_t overlap(uint64_t first, uint64_t count, uint64_t begin, uint64_t end) {
  const uint64_t from = std::max(first, begin), to = std::min(first + count, end);
  return from < to ? to - from : 0;
}

}  // namespace

Slab::Slab(uint64_t pool_bytes, uint32_t granule_bytes, const std::vector<uint64_t>& regions)
    : granule_bytes_(granule_bytes), granules_(pool_bytes / granule_bytes), whole_(0, granules_),
      words_((granules_ + 63) / 64, 0) {
  for (size_t i = 0; regions.size() > 1 && i < regions.size(); ++i) {
    const uint64_t end = i + 1 < regions.size() ? regions[i + 1] / granule_bytes : granules_;
    regions_.emplace_back(regions[i] / granule_bytes, end);
  }
  mark(0, granules_, true);
}

std::optional<Slot> Slab::allocate(uint64_t bytes, uint32_t region) {
  const uint64_t count = granules_of(bytes);
  if (count == 0 || count > whole_.free || count >= whole_.too_long) return std::nullopt;
  std::optional<uint64_t> first = search_regions(count, region);
  if (!first) first = search(whole_, count);
  if (!first) return std::nullopt;
  return take(*first, bytes);
}

Slot Slab::take(uint64_t first, uint64_t bytes) {
  const uint64_t count = granules_of(bytes);
  mark(first, count, false);
  whole_.free -= count;
  for (Span& span : regions_) span.free -= overlap(first, count, span.begin, span.end);
  return Slot{first * granule_bytes_, bytes, ++last_generation_, 0};
}

std::optional<Slot> Slab::claim(uint64_t offset, uint64_t bytes) {
  const uint64_t first = offset / granule_bytes_, count = granules_of(bytes);
  if (offset % granule_bytes_ != 0 || count == 0 || first >= granules_ || count > granules_ - first)
    return std::nullopt;
  if (!is_free(first) || next_used(first, first + count) != first + count) return std::nullopt;
  return take(first, bytes);
}

void Slab::release(const Slot& slot) {
  const uint64_t first = slot.offset / granule_bytes_;
  const uint64_t count = granules_of(slot.bytes);
  mark(first, count, true);
  freed(whole_, first, count);
  for (Span& span : regions_)
    if (const uint64_t here = overlap(first, count, span.begin, span.end))
      freed(span, std::max(first, span.begin), here);
}

// The wanted region first, then those with the most room.
std::optional<uint64_t> Slab::search_regions(uint64_t count, uint32_t first) {
  std::vector<size_t> order(regions_.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    if ((a == first) != (b == first)) return a == first;
    return regions_[a].free > regions_[b].free;
  });
  for (const size_t region : order)
    if (const auto found = search(regions_[region], count)) return found;
  return std::nullopt;
}

std::optional<uint64_t> Slab::search(Span& span, uint64_t count) const {
  if (count > span.free || count >= span.too_long) return std::nullopt;
  std::optional<uint64_t> first = find(count, span.cursor, span.end);
  // A run that begins before the cursor may extend beyond it.
  if (!first) first = find(count, span.begin, std::min(span.end, span.cursor + count - 1));
  if (!first) span.too_long = count;
  else span.cursor = *first + count == span.end ? span.begin : *first + count;
  return first;
}

void Slab::freed(Span& span, uint64_t first, uint64_t count) const {
  span.free += count;
  uint64_t begin = first;
  const uint64_t run = free_run_around(span, first, count, begin);
  if (run < span.too_long) return;
  // The next search starts at the run that can meet the failed request now.
  span.too_long = span.end - span.begin + 1;
  span.cursor = begin;
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

// The first used granule at or after `granule`, or `limit` if there is none before that.
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

// The length of the free run in the span around the given free granules, as far as it matters.
uint64_t Slab::free_run_around(const Span& span, uint64_t first, uint64_t count,
                               uint64_t& begin) const {
  const uint64_t enough = span.too_long;
  if (enough > span.end - span.begin) return count;
  uint64_t run = count;
  for (uint64_t at = first + count; run < enough && at < span.end && is_free(at); ++at) ++run;
  for (; run < enough && begin > span.begin && is_free(begin - 1); --begin) ++run;
  return run;
}

}  // namespace kv
