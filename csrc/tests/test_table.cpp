#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "check.h"
#include "purge.h"
#include "table/leases.h"
#include "table/table.h"
#include "table/waits.h"

namespace {

using namespace kv;
constexpr uint64_t kBlock = 4096;
constexpr uint64_t kMe = 1, kOther = 2;
const PartIds kOnePart{1}, kTwoParts{1, 2};

Hash name(uint32_t i) {
  Hash hash{};
  std::memcpy(hash.bytes, &i, sizeof i);
  hash.bytes[31] = 1;
  return hash;
}
BlockKey key(uint32_t i) { return {1, name(i)}; }
std::vector<Hash> chain(uint32_t count) {
  std::vector<Hash> hashes;
  for (uint32_t i = 1; i <= count; ++i) hashes.push_back(name(i));
  return hashes;
}

struct Store {
  explicit Store(uint64_t blocks) : slab(blocks * kBlock, 4096), table(slab, Quotas("lru")) {}

  // Block i hangs on block i - 1; block 1 begins a chain.
  Table::Reserved reserve(uint32_t i, uint32_t part = 1, uint64_t session = kMe) {
    return table.reserve(key(i), i == 1 ? std::optional<BlockKey>() : key(i - 1), part, kBlock,
                         session);
  }
  void put(uint32_t i, uint32_t part = 1) {
    const auto reserved = reserve(i, part);
    CHECK(reserved.status == BlockStatus::kGranted);
    CHECK(table.commit(key(i), part, kMe, reserved.slot.generation, i) == BlockStatus::kOk);
  }
  uint32_t match(uint32_t count, const PartIds& parts = kOnePart) {
    const auto hashes = chain(count);
    const uint32_t run = table.match(1, parts, {hashes.data(), count});
    for (uint32_t k = 0; k < run; ++k) table.touch(*table.find({1, hashes[k]}));
    return run;
  }
  bool holds(uint32_t i) { return table.find_complete(key(i), kOnePart) != nullptr; }

  Slab slab;
  Table table;
};

void nothing_is_found_before_its_commit() {
  Store s(4);
  const auto reserved = s.reserve(1);
  CHECK(s.match(1) == 0);
  CHECK(s.reserve(1, 1, kOther).status == BlockStatus::kBusy);
  CHECK(s.table.commit(key(1), 1, kOther, reserved.slot.generation, 0) == BlockStatus::kGone);
  CHECK(s.table.commit(key(1), 1, kMe, reserved.slot.generation + 1, 0) == BlockStatus::kGone);
  CHECK(s.match(1) == 0);
  CHECK(s.table.commit(key(1), 1, kMe, reserved.slot.generation, 0) == BlockStatus::kOk);
  CHECK(s.match(1) == 1);
  CHECK(s.reserve(1, 1, kOther).status == BlockStatus::kExists);
  CHECK(s.table.commit(key(1), 1, kMe, reserved.slot.generation, 0) == BlockStatus::kGone);
}

void a_block_matches_with_all_parts_or_not_at_all() {
  Store s(4);
  s.put(1, 1);
  CHECK(s.match(1, kTwoParts) == 0);
  const auto second = s.reserve(1, 2);
  CHECK(s.match(1, kTwoParts) == 0);
  CHECK(s.table.commit(key(1), 2, kMe, second.slot.generation, 0) == BlockStatus::kOk);
  CHECK(s.match(1, kTwoParts) == 1);
  CHECK(s.match(1, kOnePart) == 1);
}

void a_child_goes_before_its_parent_and_the_oldest_chain_first() {
  Store s(4);
  for (uint32_t i = 1; i <= 3; ++i) s.put(i);
  CHECK(s.table.reserve(key(100), std::nullopt, 1, kBlock, kMe).status == BlockStatus::kGranted);
  CHECK(s.table.reserve(key(101), std::nullopt, 1, kBlock, kMe).status == BlockStatus::kGranted);
  CHECK(!s.holds(3) && s.match(3) == 2);
  CHECK(s.table.reserve(key(102), std::nullopt, 1, kBlock, kMe).status == BlockStatus::kGranted);
  CHECK(s.match(3) == 1);
  CHECK(s.table.counts().evictions == 2);
}

void a_hit_makes_a_block_younger() {
  Store s(2);
  for (const uint32_t i : {50u, 60u}) {
    const auto reserved = s.table.reserve(key(i), std::nullopt, 1, kBlock, kMe);
    CHECK(s.table.commit(key(i), 1, kMe, reserved.slot.generation, 0) == BlockStatus::kOk);
  }
  s.table.touch(*s.table.find_complete(key(50), kOnePart));
  CHECK(s.reserve(1).status == BlockStatus::kGranted);
  CHECK(s.holds(50) && !s.holds(60));
}

void the_prefix_that_is_being_extended_does_not_go_for_its_own_end() {
  Store s(3);
  for (uint32_t i = 1; i <= 3; ++i) s.put(i);
  CHECK(s.reserve(4).status == BlockStatus::kNoSpace);
  CHECK(s.match(3) == 3);
}

void nothing_leased_goes() {
  Store s(2);
  Leases leases(s.table);
  s.put(1);
  s.put(2);
  Block* second = s.table.find_complete(key(2), kOnePart);
  const uint64_t lease = leases.acquire(kMe, {second});
  CHECK(s.table.reserve(key(9), std::nullopt, 1, kBlock, kMe).status == BlockStatus::kNoSpace);
  CHECK(!leases.release(kOther, lease));
  CHECK(leases.release(kMe, lease) && !leases.release(kMe, lease));
  CHECK(s.table.reserve(key(9), std::nullopt, 1, kBlock, kMe).status == BlockStatus::kGranted);
  CHECK(!s.holds(2) && s.holds(1));
}

void what_is_forgotten_while_leased_keeps_its_slot_until_released() {
  Store s(1);
  Leases leases(s.table);
  s.put(1);
  leases.acquire(kMe, {s.table.find_complete(key(1), kOnePart)});
  CHECK(s.table.remove(key(1)) && !s.holds(1));
  CHECK(s.reserve(1).status == BlockStatus::kNoSpace);
  leases.drop_session(kMe);
  CHECK(leases.size() == 0 && leases.blocks() == 0 && s.table.counts().pinned_blocks == 0);
  CHECK(s.reserve(1).status == BlockStatus::kGranted);
}

void forgetting_a_block_leaves_its_writer_alone() {
  Store s(4);
  s.put(1, 1);
  const auto writing = s.reserve(1, 2);
  CHECK(s.table.remove(key(1)));
  CHECK(s.match(1) == 0);
  CHECK(s.table.commit(key(1), 2, kMe, writing.slot.generation, 0) == BlockStatus::kOk);
  CHECK(s.table.find_complete(key(1), {2}) != nullptr);
  CHECK(test::purge(s.table) == 1 && s.slab.free_bytes() == s.slab.pool_bytes());
}

void children_wait_for_a_parent_that_comes_late_or_again() {
  Store s(3);
  s.put(2);
  CHECK(s.match(2) == 0);
  s.put(1);
  CHECK(s.match(2) == 2);
  CHECK(s.table.remove(key(1)) && s.match(2) == 0);
  s.put(1);
  CHECK(s.match(2) == 2);
  // Block 1 has its child again: only block 2 may go.
  CHECK(s.table.reserve(key(8), std::nullopt, 1, 2 * kBlock, kMe).status == BlockStatus::kGranted);
  CHECK(s.match(1) == 1 && !s.holds(2));
}

void parents_that_form_a_ring_can_still_be_evicted() {
  Store s(3);
  for (const auto& [i, parent] : {std::pair{1u, 3u}, {2u, 1u}, {3u, 2u}}) {
    const auto reserved = s.table.reserve(key(i), key(parent), 1, kBlock, kMe);
    CHECK(s.table.commit(key(i), 1, kMe, reserved.slot.generation, 0) == BlockStatus::kOk);
  }
  for (uint32_t i = 50; i < 53; ++i)
    CHECK(s.table.reserve(key(i), std::nullopt, 1, kBlock, kMe).status == BlockStatus::kGranted);
  CHECK(s.table.counts().evictions == 3);
}

// Each block that comes late is looked for among those that it hangs on.
uint64_t steps_to_fill_the_holes_of_a_chain(uint32_t blocks) {
  Store s(blocks);
  for (uint32_t i = 1; i <= blocks; ++i) s.put(i);
  for (uint32_t i = 2; i <= blocks; i += 2) CHECK(s.table.remove(key(i)));
  const uint64_t before = s.table.chain_steps();
  for (uint32_t i = 2; i <= blocks; i += 2) s.put(i);
  CHECK(s.match(blocks) == blocks);
  return s.table.chain_steps() - before;
}

void a_longer_chain_with_holes_takes_no_more_steps_per_block() {
  const uint64_t steps = steps_to_fill_the_holes_of_a_chain(500);
  CHECK(steps_to_fill_the_holes_of_a_chain(8000) <= 20 * steps);
}

struct Model {
  bool reserved = false, committed = false;
  uint32_t generation = 0;
};

// Random operations against a table too small for them: gauges and findings stay consistent.
void random_operations_lose_nothing() {
  std::mt19937_64 rng(17);
  Store s(24);
  Leases leases(s.table);
  std::map<uint32_t, Model> model;
  std::vector<uint64_t> held;
  for (int step = 0; step < 30'000; ++step) {
    const auto i = static_cast<uint32_t>(1 + rng() % 40);
    Model& m = model[i];
    switch (rng() % 6) {
      case 0:
      case 1: {
        const auto r = s.reserve(i);
        if (m.reserved) CHECK(r.status == BlockStatus::kBusy);
        if (r.status == BlockStatus::kGranted) m = {true, false, r.slot.generation};
        break;
      }
      case 2:
        CHECK((s.table.commit(key(i), 1, kMe, m.generation, 0) == BlockStatus::kOk) == m.reserved);
        if (m.reserved) m.reserved = false, m.committed = true;
        break;
      case 3: {
        const auto slot = s.table.take_back(key(i), 1, kMe, std::nullopt);
        CHECK(slot.has_value() == m.reserved);
        if (slot) s.slab.release(*slot), m.reserved = false;
        break;
      }
      case 4:
        if (Block* block = s.table.find_complete(key(i), kOnePart))
          held.push_back(leases.acquire(kMe, {block}));
        if (held.size() > 6) leases.release(kMe, held.front()), held.erase(held.begin());
        break;
      case 5: s.table.remove(key(i)); break;
    }
    if (s.holds(i)) CHECK(m.committed);
  }
  leases.drop_session(kMe);
  uint64_t reserved = 0;
  for (auto& [i, m] : model)
    if (m.reserved) ++reserved;
  CHECK(s.table.counts().reserved_blocks == reserved);
  for (auto& [i, m] : model)
    if (m.reserved) s.slab.release(*s.table.take_back(key(i), 1, kMe, std::nullopt));
  test::purge(s.table);
  CHECK(s.table.blocks() == 0 && s.slab.free_bytes() == s.slab.pool_bytes());
  CHECK(s.table.counts().pinned_blocks == 0 && s.table.counts().reserved_blocks == 0);
}

std::unique_ptr<Wait> wait_for(uint32_t upto, uint64_t request, TimePoint deadline) {
  return std::make_unique<Wait>(Wait{kMe, request, 1, kOnePart, chain(upto), false, deadline, 0});
}

// How many landed, of those that are to be looked at.
Waits waits_on(Table& table) {
  return Waits([&table](uint32_t spec_id, const PartIds& parts, HashSpan hashes) {
    return table.match(spec_id, parts, hashes);
  });
}

size_t landed(Waits& waits) {
  size_t count = 0;
  for (Turn turn = Turn::endless(); waits.landed(turn) != nullptr;) ++count;
  return count;
}
size_t add(Waits& waits, std::unique_ptr<Wait> wait) {
  waits.add(std::move(wait));
  return landed(waits);
}
size_t commit(Waits& waits, uint32_t i) {
  waits.committed(key(i));
  return landed(waits);
}

void a_wait_ends_when_its_last_block_lands_in_any_order() {
  Store s(8);
  Waits waits = waits_on(s.table);
  const TimePoint soon = TimePoint{} + std::chrono::seconds(1);
  CHECK(add(waits, wait_for(3, 1, soon)) == 0);
  CHECK(add(waits, wait_for(0, 2, soon)) == 1);
  for (const uint32_t i : {3u, 1u}) {
    s.put(i);
    CHECK(commit(waits, i) == 0);
  }
  s.put(2);
  CHECK(commit(waits, 2) == 1 && waits.size() == 0);
  CHECK(add(waits, wait_for(3, 3, soon)) == 1);
}

void a_wait_does_not_land_on_a_prefix_that_went_meanwhile() {
  Store s(8);
  Waits waits = waits_on(s.table);
  s.put(1);
  CHECK(add(waits, wait_for(2, 1, TimePoint::max())) == 0);
  s.table.remove(key(1));
  s.put(2);
  CHECK(commit(waits, 2) == 0);
  s.put(1);
  CHECK(commit(waits, 1) == 1);
}

void a_long_wait_is_looked_at_in_turns_and_lands_once() {
  constexpr uint32_t kBlocks = 100;
  Store s(kBlocks);
  Waits waits = waits_on(s.table);
  for (uint32_t i = 1; i < kBlocks; ++i) s.put(i);
  waits.add(wait_for(kBlocks, 1, TimePoint::max()));
  waits.add(wait_for(1, 2, TimePoint::max()));
  unsigned turns = 0, ended = 0;
  for (; waits.looking(); ++turns) {
    Turn turn(10);
    while (waits.landed(turn) != nullptr) ++ended;
    if (turns == 3) s.table.remove(key(1));  // behind where it looks
  }
  CHECK(turns >= kBlocks / 10 && ended == 0 && waits.size() == 2);
  s.put(1);
  CHECK(commit(waits, 1) == 1);
  s.put(kBlocks);
  CHECK(commit(waits, kBlocks) == 1 && waits.size() == 0);
}

void a_wait_ends_at_its_deadline_when_cancelled_or_with_its_session() {
  Store s(1);
  Waits waits = waits_on(s.table);
  const TimePoint soon = TimePoint{} + std::chrono::seconds(1);
  for (uint64_t request = 1; request <= 4; ++request)
    CHECK(add(waits, wait_for(1, request, request == 1 ? soon : TimePoint::max())) == 0);
  CHECK(waits.next_deadline() == soon && waits.has(kMe, 4));
  CHECK(waits.expired(soon - std::chrono::milliseconds(1)).empty());
  CHECK(waits.expired(soon).size() == 1);
  CHECK(waits.cancel(kMe, 2) != nullptr && waits.cancel(kMe, 2) == nullptr);
  waits.drop_session(kMe);
  CHECK(waits.size() == 0 && !waits.next_deadline());
  s.put(1);
  CHECK(commit(waits, 1) == 0);
}

}  // namespace

int main() {
  nothing_is_found_before_its_commit();
  a_block_matches_with_all_parts_or_not_at_all();
  a_child_goes_before_its_parent_and_the_oldest_chain_first();
  a_hit_makes_a_block_younger();
  the_prefix_that_is_being_extended_does_not_go_for_its_own_end();
  nothing_leased_goes();
  what_is_forgotten_while_leased_keeps_its_slot_until_released();
  forgetting_a_block_leaves_its_writer_alone();
  children_wait_for_a_parent_that_comes_late_or_again();
  parents_that_form_a_ring_can_still_be_evicted();
  a_longer_chain_with_holes_takes_no_more_steps_per_block();
  random_operations_lose_nothing();
  a_wait_ends_when_its_last_block_lands_in_any_order();
  a_wait_does_not_land_on_a_prefix_that_went_meanwhile();
  a_long_wait_is_looked_at_in_turns_and_lands_once();
  a_wait_ends_at_its_deadline_when_cancelled_or_with_its_session();
}
