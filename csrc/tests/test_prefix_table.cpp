// Against a plain model: random stores, removals, retirements and sweeps in a small, crowded table.
#include "router/prefix_table.h"

#include <cstdio>
#include <cstring>
#include <map>
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

std::vector<uint8_t> chain(const std::vector<uint64_t>& ids) {
  std::vector<uint8_t> out(ids.size() * 32);
  for (size_t i = 0; i < ids.size(); ++i) {
    for (int byte = 0; byte < 8; ++byte) out[i * 32 + 31 - byte] = uint8_t(ids[i] >> (8 * byte));
  }
  return out;
}

std::vector<uint64_t> all_of(const kv::PrefixTable& table, unsigned holder, size_t step) {
  std::vector<uint64_t> ids;
  for (size_t end = SIZE_MAX; end != 0;) end = table.held(holder, end, step, ids);
  return ids;
}

void matches_are_exact() {
  std::mt19937_64 random(7);
  kv::PrefixTable table(48);
  std::map<unsigned, std::set<uint64_t>> held;
  std::set<unsigned> resting;  // retired and not swept
  for (int step = 0; step < 200000; ++step) {
    const unsigned holder = random() % 4 == 0 ? 64 + random() % 60 : random() % 5;
    const uint64_t id = 1 + random() % 48;
    switch (random() % 8) {
      case 0:
        table.remove(holder, &id, 1);
        held[holder].erase(id);
        break;
      case 1:
        if (random() % 8 == 0) {
          table.retire(holder);
          held.erase(holder);
          resting.insert(holder);
        }
        break;
      case 2:
        if (table.sweep(1 + random() % 40) && random() % 2 == 0) {
          while (!table.sweep(64)) {
          }
          resting.clear();
        }
        break;
      default:
        if (resting.count(holder) != 0) break;
        table.store(holder, &id, 1);
        held[holder].insert(id);
    }
    if (step % 16 != 0) continue;
    std::vector<uint64_t> ids;
    for (uint64_t each = 1 + random() % 8; ids.size() < 1 + random() % 12; ++each) ids.push_back(each);
    const std::vector<uint8_t> hashes = chain(ids);
    std::map<unsigned, size_t> expected;
    for (const auto& [who, blocks] : held) {
      size_t run = 0;
      while (run < ids.size() && blocks.count(ids[run]) != 0) ++run;
      if (run != 0) expected[who] = run;
    }
    std::map<unsigned, size_t> found;
    for (const kv::HolderRun& run : table.match(hashes.data(), ids.size())) found[run.holder] = run.blocks;
    check(found == expected, "a match is the longest leading run of each holder");
    const unsigned who = random() % 5;
    const std::vector<uint64_t> list = all_of(table, who, 1 + random() % 40);
    check(std::set<uint64_t>(list.begin(), list.end()) == held[who], "what a holder has is listed");
  }
}

void the_bound_holds() {
  kv::PrefixTable table(1000);
  std::mt19937_64 random(8);
  for (int i = 0; i < 100000; ++i) {
    const uint64_t id = random();
    table.store(unsigned(random() % 127), &id, 1);
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
      table.store(1, &id, 1);
      if (i % 3 == 0) staying.insert(id);
      else going.push_back(id);
    }
    std::vector<uint64_t> ids;
    for (size_t end = SIZE_MAX; end != 0;) {
      end = table.held(1, end, 256, ids);
      for (int i = 0; i < 96 && !going.empty(); ++i, going.pop_back()) table.remove(1, &going.back(), 1);
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
  matches_are_exact();
  the_bound_holds();
  return failures == 0 ? 0 : 1;
}
