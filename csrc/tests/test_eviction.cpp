// What every eviction policy keeps to, and what sets each apart.
#include <cstring>
#include <memory>
#include <random>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "check.h"
#include "purge.h"
#include "table/eviction/policy.h"
#include "table/table.h"

namespace {

using namespace kv;
constexpr uint64_t kBytes = 4096, kMe = 1;
const PartIds kParts{1};

BlockKey key(uint64_t name) {
  BlockKey made{1, {}};
  std::memcpy(made.hash.bytes, &name, sizeof name);
  return made;
}

// A table of so many blocks, and requests to it as a router's engines make them.
struct Pool {
  Pool(std::string_view policy, uint64_t blocks)
      : slab(blocks * kBytes, kBytes), table(slab, Quotas(policy)) {}

  // Blocks of the chain that were there; the others are put. All are held meanwhile.
  size_t request(const std::vector<uint64_t>& chain) {
    now_s += 10;
    table.set_now(now_s);
    std::vector<Block*> held;
    std::optional<BlockKey> parent;
    size_t hits = 0;
    for (const uint64_t name : chain) {
      Block* block = hits == held.size() ? table.find_complete(key(name), kParts) : nullptr;
      if (block != nullptr) {
        ++hits;
        for (int touch = 0; touch < 3; ++touch) table.touch(*block);  // match, landing, load
      } else {
        const auto place = table.reserve(key(name), parent, 1, kBytes, kMe);
        if (place.status != BlockStatus::kGranted) break;
        table.commit(key(name), 1, kMe, place.slot.generation, 0);
        block = table.find_complete(key(name), kParts);
      }
      table.pin(*block);
      held.push_back(block);
      parent = key(name);
    }
    for (Block* block : held) table.unpin(*block);
    return hits;
  }
  bool holds(uint64_t name) { return table.find_complete(key(name), kParts) != nullptr; }

  double now_s = 0;
  Slab slab;
  Table table;
};

std::vector<uint64_t> chain(uint64_t first, size_t blocks) {
  std::vector<uint64_t> names;
  for (size_t i = 0; i < blocks; ++i) names.push_back(first + i);
  return names;
}

void names_make_policies_and_others_do_not() {
  CHECK(kEvictionPolicies.front() == "density");
  for (const std::string_view name : kEvictionPolicies) CHECK(make_eviction_policy(name));
  CHECK(!make_eviction_policy("fifo"));
}

// Random requests, deletions and purges: a child never stays without its parent, what is held never
// goes, and room is found as long as anything may go.
void prefixes_stay_closed_whatever_happens(std::string_view policy) {
  std::mt19937 random(5);
  for (const uint64_t blocks : {1u, 3u, 16u, 100u, 1500u}) {
    Pool pool(policy, blocks);
    for (int step = 0; step < 3000; ++step) {
      const uint64_t root = 1000 * (random() % 40);
      const std::vector<uint64_t> asked = chain(root, 1 + random() % 30);
      pool.request(asked);
      for (size_t i = 1; i < asked.size(); ++i)
        CHECK(!pool.holds(asked[i]) || pool.holds(asked[i - 1]));
      CHECK(pool.table.blocks() <= blocks);
      CHECK(pool.holds(asked[0]));
      CHECK(pool.table.counts().pinned_blocks == 0);
      if (random() % 500 == 0) test::purge(pool.table);
      if (random() % 50 == 0) {
        pool.table.remove(key(asked.back()));
        CHECK(!pool.holds(asked.back()));
      }
    }
    test::purge(pool.table);
    CHECK(pool.slab.free_bytes() == pool.slab.pool_bytes());
  }
}

void what_is_held_never_goes(std::string_view policy) {
  Pool pool(policy, 8);
  pool.request(chain(1, 4));
  Block* held = pool.table.find_complete(key(4), kParts);
  pool.table.pin(*held);
  for (uint64_t i = 1; i < 200; ++i) pool.request({1000 * i});
  for (const uint64_t name : chain(1, 4)) CHECK(pool.holds(name));
  pool.table.unpin(*held);
}

void lru_lets_go_what_was_used_longest_ago() {
  Pool pool("lru", 4);
  pool.request({10});
  pool.request({20});
  pool.request({30, 31});
  pool.request({10});
  pool.request({40});
  CHECK(!pool.holds(20) && pool.holds(10) && pool.holds(30) && pool.holds(31) && pool.holds(40));
  pool.request({50});
  CHECK(pool.holds(30) && !pool.holds(31));
}

// Twenty prompts that come back now and then, among many that never do.
size_t hits_among_passers_by(std::string_view policy) {
  std::mt19937 random(3);
  Pool pool(policy, 300);
  size_t hits = 0;
  for (uint64_t step = 1; step < 20000; ++step) {
    if (random() % 4 == 0) hits += pool.request(chain(1000 * (1 + random() % 20), 10));
    else pool.request(chain(1'000'000 + 100 * step, 10));
  }
  return hits;
}

// Conversations: each turn asks for all before it and a few blocks more; some end after each turn.
size_t hits_of_conversations(std::string_view policy) {
  std::mt19937 random(9);
  Pool pool(policy, 400);
  std::vector<std::pair<uint64_t, size_t>> open;  // first name, blocks
  size_t hits = 0;
  uint64_t next = 1;
  for (int step = 0; step < 20000; ++step) {
    while (open.size() < 40) open.emplace_back(1000 * next++, 0);
    const size_t which = random() % open.size();
    open[which].second += 3;
    hits += pool.request(chain(open[which].first, open[which].second));
    if (random() % 4 == 0) open.erase(open.begin() + static_cast<ptrdiff_t>(which));
  }
  return hits;
}

void density_is_near_lru_where_that_is_good_and_far_ahead_where_it_is_not() {
  CHECK(100 * hits_of_conversations("density") >= 97 * hits_of_conversations("lru"));
  CHECK(2 * hits_among_passers_by("density") > 3 * hits_among_passers_by("lru"));
}

// Agents with long prompts, and more users with short ones: the time that computing what was found
// would take, if that of a block is 1 + depth / 40.
double seconds_of_agents(std::string_view policy) {
  std::mt19937 random(11);
  Pool pool(policy, 1200);
  double seconds = 0;
  for (int step = 0; step < 20000; ++step) {
    const bool agent = random() % 8 == 0;
    const size_t found = agent ? pool.request(chain(1000 * (1 + random() % 12), 300))
                               : pool.request(chain(1'000'000 + 100 * (random() % 150), 12));
    for (size_t depth = 0; depth < found; ++depth) seconds += 1 + static_cast<double>(depth) / 40;
  }
  return seconds;
}

void density_for_seconds_saves_more_of_them() {
  CHECK(seconds_of_agents("density-seconds") > 1.2 * seconds_of_agents("density"));
}

}  // namespace

int main() {
  names_make_policies_and_others_do_not();
  for (const std::string_view policy : kEvictionPolicies) {
    prefixes_stay_closed_whatever_happens(policy);
    what_is_held_never_goes(policy);
  }
  lru_lets_go_what_was_used_longest_ago();
  density_is_near_lru_where_that_is_good_and_far_ahead_where_it_is_not();
  density_for_seconds_saves_more_of_them();
}
