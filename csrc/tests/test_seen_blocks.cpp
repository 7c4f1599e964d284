// The sketch of blocks that were asked for: what it must know, and how often it may be wrong.
#include "router/seen_blocks.h"

#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

namespace {

int failures = 0;

void check(bool good, const char* what) {
  if (!good) {
    std::fprintf(stderr, "FAILED: %s\n", what);
    ++failures;
  }
}

std::vector<uint64_t> chain(size_t blocks, std::mt19937_64& random) {
  std::vector<uint64_t> ids(blocks);
  for (uint64_t& id : ids) id = random();
  return ids;
}

void a_chain_is_seen_up_to_where_it_differs() {
  kv::SeenBlocks seen(1 << 20);
  std::mt19937_64 random(1);
  std::vector<uint64_t> first = chain(100, random), other = chain(100, random);
  check(seen.see(first, 7) == 0, "nothing was seen at first");
  check(seen.see(first, 7) == 100, "all of it was seen then");
  check(seen.see(first, 8) == 0, "another seed has other chains");
  std::copy(first.begin(), first.begin() + 40, other.begin());
  check(seen.see(other, 7) == 40, "a branch was seen up to where it leaves");
  check(seen.see({}, 7) == 0, "an empty chain has no block");
}

void the_last_blocks_of_its_horizon_are_known() {
  kv::SeenBlocks seen(1 << 16);
  std::mt19937_64 random(2);
  std::vector<uint64_t> all;
  for (int round = 0; round < 40; ++round) {
    const std::vector<uint64_t> more = chain(seen.horizon() / 8, random);
    seen.see(more, 0);
    all.insert(all.end(), more.begin(), more.end());
  }
  const std::vector<uint64_t> last(all.end() - static_cast<long>(seen.horizon()), all.end());
  check(seen.see(last, 0) == last.size(), "none of them is forgotten");
  check(seen.see({all.front()}, 0) == 0, "the first ones are");
}

void few_new_blocks_count_as_seen(size_t blocks, size_t bytes) {
  kv::SeenBlocks seen(bytes);
  std::mt19937_64 random(3);
  for (size_t at = 0; at < blocks; at += 1000) seen.see(chain(1000, random), 0);
  const size_t asked = 200000;
  size_t wrong = 0;
  for (size_t i = 0; i < asked; ++i) wrong += seen.see({random()}, 0);
  std::printf("%zu blocks in %zu bytes: %.4f %% of new ones count as seen\n", blocks, seen.bytes(),
              100.0 * static_cast<double>(wrong) / asked);
  check(wrong * 200 <= asked, "at most one in 200");
}

}  // namespace

int main() {
  a_chain_is_seen_up_to_where_it_differs();
  the_last_blocks_of_its_horizon_are_known();
  kv::SeenBlocks small(1 << 20);
  few_new_blocks_count_as_seen(2 * small.horizon() - 1000, 1 << 20);  // both filters are full
  few_new_blocks_count_as_seen(10000000, 48 << 20);
  return failures == 0 ? 0 : 1;
}
