// Writes the seeds of the fuzz target that it is linked with into a folder, as the first corpus of libFuzzer.
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "seeds.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
    return 2;
  }
  const std::vector<std::string> seeds = fuzz_seeds();
  for (size_t i = 0; i < seeds.size(); ++i) {
    std::ofstream file(std::string(argv[1]) + "/seed-" + std::to_string(i), std::ios::binary);
    file.write(seeds[i].data(), static_cast<std::streamsize>(seeds[i].size()));
    if (!file) return 1;
  }
}
