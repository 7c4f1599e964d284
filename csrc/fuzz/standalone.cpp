// Runs a fuzz target without libFuzzer: on the files it is given, or on mutated seeds and noise.
//
//     request_fuzz [--runs N] [--seed N] [FILE...]
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "seeds.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using Random = std::mt19937_64;

void run(const std::string& input) {
  // A copy of its own, exactly as large: a sanitizer sees the first byte read beyond it.
  const std::vector<uint8_t> bytes(input.begin(), input.end());
  LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
}

size_t below(Random& random, size_t limit) { return limit == 0 ? 0 : random() % limit; }

void mutate(std::string& input, const std::vector<std::string>& seeds, Random& random) {
  const size_t at = below(random, input.size());
  const std::string& other = seeds[below(random, seeds.size())];
  static constexpr uint8_t kEdges[] = {0, 1, 0x7F, 0x80, 0xFE, 0xFF};
  switch (random() % 6) {
    case 0:
      if (!input.empty()) input[at] = static_cast<char>(input[at] ^ (1 << random() % 8));
      break;
    case 1:
      if (!input.empty()) input[at] = static_cast<char>(kEdges[random() % sizeof kEdges]);
      break;
    case 2: input.resize(at); break;
    case 3: input.insert(at, other, below(random, other.size()), 1 + below(random, 64)); break;
    case 4: input.erase(at, 1 + below(random, 16)); break;
    case 5: input += other; break;
  }
}

void run_random(uint64_t runs, uint64_t seed) {
  Random random(seed);
  const std::vector<std::string> seeds = fuzz_seeds();
  for (const std::string& each : seeds) run(each);
  for (uint64_t i = 0; i < runs; ++i) {
    std::string input;
    if (random() % 8 == 0) {
      input.resize(below(random, 300));
      for (char& byte : input) byte = static_cast<char>(random());
    } else {
      input = seeds[below(random, seeds.size())];
      for (uint64_t times = 1 + random() % 6; times != 0; --times) mutate(input, seeds, random);
    }
    run(input);
  }
  std::printf("%llu inputs, seed %llu\n", static_cast<unsigned long long>(runs),
              static_cast<unsigned long long>(seed));
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t runs = 20'000, seed = 1;
  bool files = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--runs") == 0 && i + 1 < argc) {
      runs = std::strtoull(argv[++i], nullptr, 10);
    } else if (std::strcmp(argv[i], "--seed") == 0 && i + 1 < argc) {
      seed = std::strtoull(argv[++i], nullptr, 10);
    } else {
      std::ifstream file(argv[i], std::ios::binary);
      run({std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()});
      files = true;
    }
  }
  if (!files) run_random(runs, seed);
}
