// Against a plain model: random stores, removals, retirements and sweeps in a small, crowded table.
#include "prefix_table.h"

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

}  // namespace

int main() {
  matches_are_exact();
  the_bound_holds();
  return failures == 0 ? 0 : 1;
}
