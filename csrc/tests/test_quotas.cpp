// Shares of the pool: which block is evicted, what counts for which tenant, and what none may hold.
#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "check.h"
#include "purge.h"
#include "quota_model.h"
#include "table/leases.h"
#include "table/quotas.h"
#include "table/table.h"

namespace {

using namespace kv;
using Model = test::QuotaModel;
constexpr uint64_t kBlock = 4096, kMe = 1;
const PartIds kParts{1};

BlockKey key(uint32_t tenant, uint32_t i) {
  BlockKey made{tenant, {}};  // the spec has its tenant's number
  std::memcpy(made.hash.bytes, &i, sizeof i);
  made.hash.bytes[31] = 1;
  return made;
}

struct Store {
  Store(uint64_t blocks, std::vector<uint64_t> quota_blocks, const char* policy = "lru")
      : slab(blocks * kBlock, kBlock), table(slab, quotas(std::move(quota_blocks), policy)) {
    for (uint32_t tenant = 1; tenant <= count; ++tenant) table.quotas().own(tenant, tenant);
  }
  Quotas quotas(std::vector<uint64_t> quota_blocks, const char* policy) {
    count = static_cast<uint32_t>(quota_blocks.size());
    for (uint64_t& quota : quota_blocks) quota *= kBlock;
    return Quotas(policy, slab.pool_bytes(), quota_blocks);
  }

  BlockStatus put(uint32_t tenant, uint32_t i, std::optional<uint32_t> parent = std::nullopt) {
    const auto above = parent ? std::optional(key(tenant, *parent)) : std::nullopt;
    const auto reserved = table.reserve(key(tenant, i), above, 1, kBlock, kMe);
    if (reserved.status == BlockStatus::kGranted)
      table.commit(key(tenant, i), 1, kMe, reserved.slot.generation, 0);
    return reserved.status;
  }
  void fill(uint32_t tenant, uint32_t first, uint32_t blocks) {
    for (uint32_t i = first; i < first + blocks; ++i)
      CHECK(put(tenant, i) == BlockStatus::kGranted);
  }
  Block* find(uint32_t tenant, uint32_t i) { return table.find_complete(key(tenant, i), kParts); }
  uint32_t holds(uint32_t tenant, uint32_t first, uint32_t blocks) {
    uint32_t found = 0;
    for (uint32_t i = first; i < first + blocks; ++i) found += find(tenant, i) != nullptr;
    return found;
  }
  uint64_t used(uint32_t tenant) { return table.quotas().use(tenant).used_bytes / kBlock; }
  uint64_t held(uint32_t tenant) { return table.quotas().use(tenant).held_bytes / kBlock; }

  uint32_t count = 0;
  Slab slab;
  Table table;
};

void while_there_is_room_every_tenant_may_use_it() {
  Store s(10, {4, 6});
  s.fill(1, 0, 10);
  CHECK(s.used(1) == 10 && s.table.counts().evictions == 0);
}

void what_was_lent_is_taken_back_up_to_the_quota_and_no_further() {
  Store s(10, {4, 6});
  s.fill(1, 0, 10);
  s.fill(2, 0, 6);
  CHECK(s.used(1) == 4 && s.used(2) == 6 && s.holds(1, 6, 4) == 4);
  s.fill(2, 100, 50);
  CHECK(s.used(1) == 4 && s.holds(1, 6, 4) == 4 && s.holds(2, 144, 6) == 6);
  s.fill(1, 200, 50);
  CHECK(s.used(2) == 6 && s.holds(2, 144, 6) == 6);
  CHECK(s.table.quotas().use(1).evictions == 56 && s.table.quotas().use(2).evictions == 50);
}

void those_without_a_quota_are_as_one_that_has_what_is_left() {
  Store s(10, {4, 0, 0});
  s.fill(2, 0, 5);
  s.fill(3, 0, 5);
  s.fill(1, 0, 4);  // takes the oldest of both
  CHECK(s.holds(2, 0, 5) == 1 && s.holds(3, 0, 5) == 5);
  s.fill(3, 10, 1);  // replaces the oldest of both
  CHECK(s.holds(2, 0, 5) == 0 && s.holds(3, 0, 5) == 5 && s.holds(1, 0, 4) == 4);
}

void room_is_made_by_the_tenant_furthest_over_its_share() {
  Store s(12, {2, 2, 8});
  s.fill(1, 0, 5);
  s.fill(2, 0, 7);
  s.fill(3, 0, 2);
  CHECK(s.used(1) == 5 && s.used(2) == 5);
  s.fill(3, 2, 6);
  CHECK(s.used(1) == 2 && s.used(2) == 2 && s.used(3) == 8);
}

void no_tenant_can_hold_so_much_that_a_quota_cannot_be_taken_back() {
  Store s(10, {4, 6});
  Leases leases(s.table);
  s.fill(1, 0, 10);
  std::vector<Block*> four;
  for (uint32_t i = 0; i < 4; ++i) four.push_back(s.find(1, i));
  const uint64_t lease = leases.acquire(kMe, four);
  CHECK(s.table.quotas().within_limits(1) && s.held(1) == 4);
  CHECK(s.put(1, 50) == BlockStatus::kNoSpace);  // what it writes is held too
  leases.acquire(kMe, {s.find(1, 5)});
  CHECK(!s.table.quotas().within_limits(1));
  leases.drop_session(kMe);
  leases.acquire(kMe, four);
  s.fill(2, 0, 6);
  CHECK(s.holds(1, 0, 4) == 4 && !leases.release(kMe, lease));
}

void a_lease_on_the_end_of_a_chain_counts_for_all_of_it() {
  Store s(10, {4, 6});
  for (uint32_t i = 0; i < 4; ++i)
    s.put(1, i, i == 0 ? std::nullopt : std::optional<uint32_t>(i - 1));
  s.table.pin(*s.find(1, 3));
  CHECK(s.held(1) == 4);
  CHECK(s.put(1, 4, 3) == BlockStatus::kNoSpace && s.put(2, 0) == BlockStatus::kGranted);
  s.table.remove(key(1, 1));  // what comes before it hangs on nothing any more
  CHECK(s.held(1) == 2);
  CHECK(s.put(1, 1, 0) == BlockStatus::kGranted && s.held(1) == 4);
  s.table.unpin(*s.find(1, 3));
  CHECK(s.held(1) == 0);
}

void what_leaves_under_a_pin_is_its_tenants_until_the_pin_goes() {
  Store s(4, {2, 2});
  s.fill(1, 0, 2);
  Block* block = s.find(1, 0);
  s.table.pin(*block);
  CHECK(s.table.remove(key(1, 0)) && s.used(1) == 2 && s.held(1) == 1);
  s.table.unpin(*block);
  CHECK(s.used(1) == 1 && s.held(1) == 0);
  const auto reserved = s.table.reserve(key(1, 9), std::nullopt, 1, kBlock, kMe);
  const auto slot = s.table.take_back(key(1, 9), 1, kMe, reserved.slot.generation);
  CHECK(slot && s.used(1) == 2 && s.held(1) == 0);  // as a fenced slot is
  s.table.release(*slot);
  CHECK(s.used(1) == 1);
}

void each_part_counts_also_when_its_block_is_forgotten_meanwhile() {
  for (const bool leased : {false, true}) {
    Store s(10, {6, 4});
    s.fill(1, 0, 1);
    Block* block = s.find(1, 0);
    if (leased) s.table.pin(*block);
    const auto second = s.table.reserve(key(1, 0), std::nullopt, 2, 2 * kBlock, kMe);
    CHECK(second.status == BlockStatus::kGranted && s.used(1) == 3 && s.held(1) == 3);
    CHECK(s.table.remove(key(1, 0)));
    CHECK(s.held(1) == (leased ? 3 : 2) && s.used(1) == s.held(1));
    if (leased) s.table.unpin(*block);
    CHECK(s.held(1) == 2 && s.used(1) == 2);
    CHECK(s.table.commit(key(1, 0), 2, kMe, second.slot.generation, 0) == BlockStatus::kOk);
    CHECK(s.held(1) == 0 && s.used(1) == 2 && s.table.quotas().use(1).blocks == 1);
    CHECK(test::purge(s.table) == 1 && s.used(1) == 0 && s.table.quotas().use(1).pins == 0);
  }
}

void one_tenant_alone_and_an_open_table_have_no_limits() {
  for (const bool open : {true, false}) {
    Slab slab(4 * kBlock, kBlock);
    Table table(slab, open ? Quotas("lru") : Quotas("lru", slab.pool_bytes(), {kBlock}));
    if (!open) table.quotas().own(1, 1);
    for (uint32_t i = 0; i < 4; ++i) {
      const auto reserved = table.reserve(key(1, i), std::nullopt, 1, kBlock, kMe);
      CHECK(reserved.status == BlockStatus::kGranted && table.quotas().within_limits(1 - open));
    }
  }
}

struct Storm {
  Storm(uint64_t blocks, std::vector<uint64_t> quota_blocks, uint64_t seed)
      : random(seed), store(blocks, quota_blocks), model(blocks, std::move(quota_blocks)) {}

  // Blocks stand in chains of six.
  static std::optional<uint32_t> parent_of(uint32_t i) {
    return i % 6 == 0 ? std::nullopt : std::optional(i - 1);
  }
  void put(uint32_t tenant, uint32_t i, bool commit) {
    const auto parent = parent_of(i);
    const auto above = parent ? std::optional(key(tenant, *parent)) : std::nullopt;
    const auto reserved = store.table.reserve(key(tenant, i), above, 1, kBlock, kMe);
    CHECK(model.reserve(tenant, i, parent) == reserved.status);
    if (reserved.status != BlockStatus::kGranted) return;
    generations[{tenant, i}] = reserved.slot.generation;
    if (commit) end_write(tenant, i, true);
  }
  void end_write(uint32_t tenant, uint32_t i, bool commit) {
    Model::Entry* e = model.find(tenant, i);
    if (e == nullptr || !e->reserved) return;
    const uint32_t generation = generations[{tenant, i}];
    if (commit) {
      CHECK(store.table.commit(key(tenant, i), 1, kMe, generation, 0) == BlockStatus::kOk);
      e->reserved = false;
    } else {
      store.table.release(*store.table.take_back(key(tenant, i), 1, kMe, generation));
      model.entries.erase(model.entries.begin() + (e - model.entries.data()));
    }
  }
  void pin(uint32_t tenant, uint32_t i) {
    Model::Entry* e = model.find(tenant, i);
    if (e == nullptr || e->reserved) return;
    Block& block = *store.find(tenant, i);
    store.table.pin(block);
    ++e->pins;
    CHECK(store.table.quotas().within_limits(tenant) == model.may_hold(tenant, 0));
    if (store.table.quotas().within_limits(tenant)) return pinned.emplace_back(tenant, i), void();
    store.table.unpin(block);
    --e->pins;
  }
  void unpin() {
    if (pinned.empty()) return;
    const auto [tenant, i] = pinned[random() % pinned.size()];
    pinned.erase(std::find(pinned.begin(), pinned.end(), std::pair(tenant, i)));
    store.table.unpin(*store.find(tenant, i));
    --model.find(tenant, i)->pins;
  }
  void forget(uint32_t tenant, uint32_t i) {
    const Model::Entry* e = model.find(tenant, i);
    if (e == nullptr || e->pins != 0 || e->reserved) return;
    CHECK(store.table.remove(key(tenant, i)));
    model.entries.erase(model.entries.begin() + (e - model.entries.data()));
  }
  void step() {
    const auto tenant = static_cast<uint32_t>(1 + random() % store.count);
    const auto i = static_cast<uint32_t>(random() % 40);
    switch (random() % 16) {
      case 0: return put(tenant, i, false);
      case 1: return end_write(tenant, i, true);
      case 2: return end_write(tenant, i, false);
      case 3: return pin(tenant, i);
      case 4: return unpin();
      case 5: return forget(tenant, i);
      default: return put(tenant, i, true);
    }
  }
  void compare() {
    CHECK(store.table.blocks() == model.entries.size());
    for (const Model::Entry& e : model.entries)
      CHECK(e.reserved || store.find(e.tenant, e.i) != nullptr);
    for (uint32_t tenant = 1; tenant <= store.count; ++tenant) {
      const auto of_tenant = [&](const Model::Entry& e) { return e.tenant == tenant; };
      CHECK(store.used(tenant) == static_cast<uint64_t>(std::count_if(
                                      model.entries.begin(), model.entries.end(), of_tenant)));
      CHECK(store.held(tenant) == model.held(tenant));
      CHECK(model.may_hold(tenant, 0));
    }
  }

  std::mt19937_64 random;
  Store store;
  Model model;
  std::map<std::pair<uint32_t, uint32_t>, uint32_t> generations;
  std::vector<std::pair<uint32_t, uint32_t>> pinned;
};

void any_history_leaves_what_the_rule_says() {
  const std::vector<std::pair<uint64_t, std::vector<uint64_t>>> pools = {
      {16, {8, 8}}, {16, {4, 0}}, {24, {6, 10, 0, 0}}, {24, {0, 0, 0}}, {32, {2, 30}}, {9, {3, 3, 3}},
  };
  for (uint64_t seed = 0; seed < 60; ++seed) {
    const auto& [blocks, quotas] = pools[seed % pools.size()];
    Storm storm(blocks, quotas, seed);
    for (int step = 0; step < 1500; ++step) {
      storm.step();
      storm.compare();
    }
  }
}

// What a chain of so many blocks costs to put, to lease as a whole and by its end, and to evict.
uint64_t chain_steps(uint32_t blocks) {
  Store s(4 * blocks, {2 * blocks, 2 * blocks});
  Leases leases(s.table);
  std::vector<Block*> run;
  for (uint32_t i = 0; i < blocks; ++i) {
    CHECK(s.put(1, i, i == 0 ? std::nullopt : std::optional(i - 1)) == BlockStatus::kGranted);
    run.push_back(s.find(1, i));
  }
  for (uint32_t i = 0; i < blocks; ++i) {
    leases.acquire(kMe, {run.back()});
    CHECK(s.held(1) == blocks && s.table.quotas().within_limits(1));
    leases.drop_session(kMe);
    CHECK(s.held(1) == 0);
  }
  leases.acquire(kMe, run);
  leases.drop_session(kMe);
  s.fill(2, 0, 3 * blocks);
  s.fill(2, 3 * blocks, blocks);
  CHECK(s.holds(1, 0, blocks) == blocks);
  s.fill(1, blocks, 3 * blocks);
  CHECK(s.holds(1, 0, blocks) == 0 && s.held(1) == 0);
  return s.table.chain_steps();
}

void a_longer_chain_takes_no_more_steps_per_block() {
  const uint64_t steps = chain_steps(500);
  CHECK(chain_steps(8000) <= 17 * steps);
}

// Whatever the policy and the sizes: what a tenant has within its quota never goes for another.
void a_storm_of_one_takes_nothing_from_the_quota_of_another(const char* policy) {
  std::mt19937_64 random(7);
  Store s(400, {100, 0, 60}, policy);
  s.fill(2, 0, 400);
  s.fill(1, 0, 100);
  double now_s = 0;
  for (uint32_t step = 0; step < 20'000; ++step) {
    s.table.set_now(now_s += 0.1);
    const uint32_t tenant = 2 + random() % 2;
    const auto i = static_cast<uint32_t>(random() % 3000);
    const auto reserved = s.table.reserve(key(tenant, i), std::nullopt, 1,
                                          kBlock * (1 + i % 5) - i % kBlock, kMe);
    CHECK(reserved.status != BlockStatus::kBusy);
    if (reserved.status == BlockStatus::kGranted)
      s.table.commit(key(tenant, i), 1, kMe, reserved.slot.generation, 0);
    CHECK(s.holds(1, 0, 100) == 100 || step % 50 != 0);
  }
  CHECK(s.holds(1, 0, 100) == 100 && s.table.quotas().use(1).evictions == 0);
  test::purge(s.table);
  for (uint32_t tenant = 1; tenant <= 3; ++tenant)
    CHECK(s.used(tenant) == 0 && s.held(tenant) == 0 && s.table.quotas().use(tenant).blocks == 0);
}

}  // namespace

int main() {
  while_there_is_room_every_tenant_may_use_it();
  what_was_lent_is_taken_back_up_to_the_quota_and_no_further();
  those_without_a_quota_are_as_one_that_has_what_is_left();
  room_is_made_by_the_tenant_furthest_over_its_share();
  no_tenant_can_hold_so_much_that_a_quota_cannot_be_taken_back();
  a_lease_on_the_end_of_a_chain_counts_for_all_of_it();
  what_leaves_under_a_pin_is_its_tenants_until_the_pin_goes();
  each_part_counts_also_when_its_block_is_forgotten_meanwhile();
  one_tenant_alone_and_an_open_table_have_no_limits();
  any_history_leaves_what_the_rule_says();
  a_longer_chain_takes_no_more_steps_per_block();
  for (const char* policy : {"density", "lru"})
    a_storm_of_one_takes_nothing_from_the_quota_of_another(policy);
}
