// Against a plain model, in small, crowded tables.
#include "router/prefix_table.h"

#include <algorithm>
#include <cstdio>
#include <functional>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <vector>

namespace {

int failures = 0;

void check(bool good, const char* what) {
  if (!good) {
    std::fprintf(stderr, "FAILED: %s\n", what);
    ++failures;
  }
}

using Ids = std::vector<uint64_t>;
using Model = std::map<unsigned, std::set<uint64_t>>;

Ids all_of(const kv::PrefixTable& table, unsigned holder, size_t step) {
  Ids ids;
  for (size_t end = SIZE_MAX; end != 0;) end = table.held(holder, end, step, ids);
  return ids;
}

std::map<unsigned, size_t> runs_of(const Model& held, const Ids& chain) {
  std::map<unsigned, size_t> runs;
  for (const auto& [who, blocks] : held) {
    size_t run = 0;
    while (run < chain.size() && blocks.count(chain[run]) != 0) ++run;
    if (run != 0) runs[who] = run;
  }
  return runs;
}

Ids ids_from(uint64_t first, size_t count) {
  Ids ids(count);
  std::iota(ids.begin(), ids.end(), first);
  return ids;
}

// Random stores, removals, retirements and sweeps, all of which fits.
void matches_are_exact(unsigned holders, uint64_t blocks, int steps) {
  std::mt19937_64 random(holders);
  kv::PrefixTable table(blocks);
  Model held;
  std::set<unsigned> resting;  // retired and not swept
  for (int step = 0; step < steps; ++step) {
    const unsigned holder = unsigned(random() % (random() % 4 != 0 ? 5 : holders));
    const uint64_t first = random() % 3 == 0 ? 1 : 1 + random() % blocks;
    const uint64_t most = std::min<uint64_t>(blocks - first + 1, 1 + random() % blocks);
    const Ids ids = ids_from(first, 1 + random() % most);
    switch (random() % 8) {
      case 0:
      case 1:
        table.remove(holder, ids);
        for (const uint64_t id : ids) held[holder].erase(id);
        break;
      case 2:
        if (random() % 8 == 0) {
          table.retire(holder);
          held.erase(holder);
          resting.insert(holder);
        }
        break;
      case 3:
        if (table.sweep(1 + random() % blocks) && random() % 2 == 0) {
          while (!table.sweep(64)) {
          }
          resting.clear();
        }
        break;
      default:
        if (resting.count(holder) != 0) break;
        table.store(holder, ids);
        held[holder].insert(ids.begin(), ids.end());
    }
    if (step % 16 != 0) continue;
    const Ids chain = ids_from(1 + random() % 8, 1 + random() % (blocks - 8));
    const std::map<unsigned, size_t> expected = runs_of(held, chain);
    std::map<unsigned, size_t> found;
    for (const kv::HolderRun& run : table.match(chain)) found[run.holder] = run.blocks;
    const Ids list = all_of(table, holder, 1 + random() % blocks);
    check(found == expected, "a match is the longest leading run of each holder");
    check(std::set(list.begin(), list.end()) == held[holder], "what a holder has is listed");
    check(table.evicted() == 0, "what fits is not forgotten");
  }
  for (unsigned holder = 0; holder < holders; ++holder) table.retire(holder);
  for (int sweeps = 0; sweeps < 2;) sweeps += table.sweep(1000);  // one may have begun before
  check(table.size() == 0, "without holders there are no blocks");
}

void a_sweep_misses_no_block_that_moves() {
  std::mt19937_64 random(11);
  for (int round = 0; round < 300; ++round) {
    kv::PrefixTable table(1000);
    Ids leaving(600), going(400);
    for (Ids* ids : {&leaving, &going}) std::generate(ids->begin(), ids->end(), std::ref(random));
    table.store(2, going);
    table.store(1, leaving);
    table.retire(1);
    while (!table.sweep(50)) {
      for (int i = 0; i < 13; ++i, going.pop_back()) table.remove(2, {going.back()});
    }
    table.store(1, {7});
    const Ids list = all_of(table, 1, 100);
    check(std::count(list.begin(), list.end(), 7) == int64_t(list.size()), "what left is gone");
    check(table.size() == going.size() + 1, "swept blocks are gone");
  }
}

void sets_that_do_not_fit_are_forgotten_and_counted() {
  std::mt19937_64 random(10);
  kv::PrefixTable table(2000);
  Model held;
  for (int step = 0; step < 1000; ++step) {
    const unsigned holder = unsigned(random() % kv::kMaxHolders);
    Ids ids;
    for (uint64_t id = 1; id <= 2000; ++id) {
      if (random() % 2 == 0) ids.push_back(id);
    }
    if (step % 10 == 9) {
      table.retire(holder);
      for (int sweeps = 0; sweeps < 2;) sweeps += table.sweep(1000);
      held.erase(holder);
    } else if (step % 4 == 3) {
      table.remove(holder, ids);
      for (const uint64_t id : ids) held[holder].erase(id);
    } else {
      table.store(holder, ids);
      held[holder].insert(ids.begin(), ids.end());
    }
  }
  check(table.evicted() != 0, "what is forgotten is counted");
  for (unsigned holder = 0; holder < kv::kMaxHolders; ++holder) {
    for (const uint64_t id : all_of(table, holder, 5000)) {
      check(held[holder].count(id) != 0, "only what a holder has is listed");
    }
    table.retire(holder);
  }
  while (!table.sweep(1000)) {
  }
  check(table.size() == 0, "without holders there are no blocks");
}

void the_bound_holds() {
  kv::PrefixTable table(1000);
  std::mt19937_64 random(8);
  for (int i = 0; i < 100000; ++i) {
    table.store(unsigned(random() % kv::kMaxHolders), {random()});
    check(table.size() <= 1000, "no more blocks than the bound");
  }
  check(table.size() == 1000, "a full table stays full");
}

void what_stays_is_listed_while_others_go() {
  std::mt19937_64 random(9);
  for (int round = 0; round < 100; ++round) {
    kv::PrefixTable table(4000);
    std::set<uint64_t> staying;
    std::vector<uint64_t> going;
    for (int i = 0; i < 4000; ++i) {
      const uint64_t id = random();
      table.store(1, {id});
      if (i % 3 == 0) staying.insert(id);
      else going.push_back(id);
    }
    std::vector<uint64_t> ids;
    for (size_t end = SIZE_MAX; end != 0;) {
      end = table.held(1, end, 256, ids);
      for (int i = 0; i < 96 && !going.empty(); ++i, going.pop_back()) table.remove(1, {going.back()});
    }
    const std::set<uint64_t> listed(ids.begin(), ids.end());
    size_t missed = 0;
    for (const uint64_t id : staying) missed += listed.count(id) == 0;
    check(missed == 0, "blocks that stay are listed");
  }
}

}  // namespace

int main() {
  what_stays_is_listed_while_others_go();
  matches_are_exact(5, 48, 100000);
  matches_are_exact(124, 48, 50000);
  matches_are_exact(kv::kMaxHolders, 200, 20000);
  a_sweep_misses_no_block_that_moves();
  sets_that_do_not_fit_are_forgotten_and_counted();
  the_bound_holds();
  return failures == 0 ? 0 : 1;
}
