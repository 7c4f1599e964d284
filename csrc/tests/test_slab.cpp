#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "check.h"
#include "memory/slab.h"

namespace {

using kv::Slab;
using kv::Slot;

const std::vector<uint64_t> kUndivided;
const std::vector<uint64_t> kThirds{0, 333 * 4096, 700 * 4096};

void slots_never_overlap_and_all_comes_back() {
  std::mt19937_64 rng(3);
  for (const uint64_t granules : {1u, 63u, 64u, 65u, 1000u, 1001u}) {
    const bool divided = granules > 1000;
    Slab slab(granules * 4096, 4096, divided ? kThirds : kUndivided);
    std::map<uint64_t, Slot> living;  // by first granule
    for (int step = 0; step < 4000; ++step) {
      if (rng() % 5 < 3) {
        const uint64_t bytes = 1 + rng() % (4096 * (rng() % 20 == 0 ? 100 : 6));
        const auto slot = slab.allocate(bytes, static_cast<uint32_t>(rng() % 4));
        if (!slot) continue;
        const uint64_t end = slot->offset + slab.granules_of(bytes) * 4096;
        CHECK(slot->offset % 4096 == 0 && end <= slab.pool_bytes());
        const auto next = living.lower_bound(slot->offset);
        CHECK(next == living.end() || next->second.offset >= end);
        CHECK(next == living.begin() ||
              std::prev(next)->second.offset +
                      slab.granules_of(std::prev(next)->second.bytes) * 4096 <=
                  slot->offset);
        living.emplace(slot->offset, *slot);
      } else if (!living.empty()) {
        auto at = living.begin();
        std::advance(at, static_cast<long>(rng() % living.size()));
        slab.release(at->second);
        living.erase(at);
      }
    }
    for (const auto& [offset, slot] : living) slab.release(slot);
    CHECK(slab.free_bytes() == slab.pool_bytes());
    for (size_t i = 0; i < slab.regions(); ++i) CHECK(slab.used_bytes_of(i) == 0);
    CHECK(slab.allocate(slab.pool_bytes()).has_value());
  }
}

// What the slab remembers about failed searches must never hide room that there is.
void whatever_fits_is_found(const std::vector<uint64_t>& regions) {
  std::mt19937_64 rng(5);
  constexpr uint64_t kGranules = 200;
  Slab slab(kGranules * 4096, 4096, regions);
  std::vector<bool> used(kGranules, false);
  std::vector<Slot> living;
  for (int step = 0; step < 20'000; ++step) {
    const uint64_t count = 1 + rng() % 12;
    if (rng() % 2 == 0) {
      uint64_t longest = 0, run = 0;
      for (const bool taken : used) longest = std::max(longest, run = taken ? 0 : run + 1);
      const auto slot = slab.allocate(count * 4096, static_cast<uint32_t>(rng() % 4));
      CHECK(slot.has_value() == (longest >= count));
      if (!slot) continue;
      for (uint64_t i = 0; i < count; ++i) used[slot->offset / 4096 + i] = true;
      living.push_back(*slot);
    } else if (!living.empty()) {
      std::swap(living[rng() % living.size()], living.back());
      for (uint64_t i = 0; i < living.back().bytes / 4096; ++i)
        used[living.back().offset / 4096 + i] = false;
      slab.release(living.back());
      living.pop_back();
    }
  }
}

void each_slot_has_another_generation() {
  Slab two(2 * 4096, 4096);
  CHECK(two.allocate(1)->generation != two.allocate(1)->generation);
  Slab slab(4096, 4096);
  const Slot first = *slab.allocate(1);
  slab.release(first);
  const Slot second = *slab.allocate(1);
  CHECK(first.offset == second.offset && first.generation != second.generation);
  CHECK(!slab.allocate(1));
  CHECK(!slab.allocate(0));
}

void a_region_is_used_up_before_another_is_taken() {
  Slab slab(30 * 4096, 4096, {0, 10 * 4096, 20 * 4096});
  CHECK(slab.regions() == 3);
  for (uint64_t i = 0; i < 10; ++i) CHECK(slab.allocate(4096, 1)->offset == (10 + i) * 4096);
  CHECK(slab.used_bytes_of(1) == 10 * 4096 && slab.used_bytes_of(0) == 0);
  const Slot beside = *slab.allocate(4096, 1);
  CHECK(beside.offset < 10 * 4096 || beside.offset >= 20 * 4096);
  slab.release({15 * 4096, 4096, 0});
  CHECK(slab.allocate(4096, 1)->offset == 15 * 4096);
}

void without_a_wish_the_region_with_most_room_is_taken() {
  Slab slab(20 * 4096, 4096, {0, 8 * 4096});
  CHECK(slab.allocate(5 * 4096)->offset == 8 * 4096);
  CHECK(slab.allocate(3 * 4096)->offset == 0);
  CHECK(slab.allocate(4096, 7)->offset == 13 * 4096);
}

void what_fits_no_region_lies_across_their_border() {
  Slab slab(20 * 4096, 4096, {0, 10 * 4096});
  const Slot low = *slab.allocate(3 * 4096, 0);
  const Slot wide = *slab.allocate(12 * 4096, 0);
  CHECK(wide.offset == 3 * 4096);
  CHECK(slab.used_bytes_of(0) == 10 * 4096 && slab.used_bytes_of(1) == 5 * 4096);
  slab.release(wide);
  slab.release(low);
  CHECK(slab.used_bytes_of(0) == 0 && slab.used_bytes_of(1) == 0);
  CHECK(slab.allocate(20 * 4096)->offset == 0);
}

}  // namespace

int main() {
  slots_never_overlap_and_all_comes_back();
  whatever_fits_is_found(kUndivided);
  whatever_fits_is_found({0, 64 * 4096, 131 * 4096});
  a_region_is_used_up_before_another_is_taken();
  without_a_wish_the_region_with_most_room_is_taken();
  what_fits_no_region_lies_across_their_border();
  each_slot_has_another_generation();
}
