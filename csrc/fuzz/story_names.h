// What the clients of a fuzzed story call things: manifests, hashes, and the bytes of a block.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "digest/crc32c.h"
#include "seeds.h"

namespace kv::fuzz {

inline void expect(bool condition, const char* file = __builtin_FILE(),
                   int line = __builtin_LINE()) {
  if (condition) return;
  std::fprintf(stderr, "%s:%d: what was expected does not hold\n", file, line);
  std::abort();
}

// A fuzzer's input, read as choices. Zeros follow its end.
class Choices {
 public:
  Choices(const uint8_t* data, size_t size) : at_(data), left_(size) {}
  bool done() const { return left_ == 0; }
  uint8_t u8() { return left_ == 0 ? uint8_t{0} : (--left_, *at_++); }
  uint32_t below(uint32_t limit) { return u8() % limit; }
  std::string take(size_t most) {
    const size_t taken = std::min(most, left_);
    std::string bytes(reinterpret_cast<const char*>(at_), taken);
    at_ += taken, left_ -= taken;
    return bytes;
  }

 private:
  const uint8_t* at_;
  size_t left_;
};

struct PartKind {
  uint8_t digest;
  uint64_t bytes;
};
struct ManifestKind {
  uint8_t spec, digest;
  std::vector<PartKind> parts;
};

// One part, several parts of which one is common, several granules, another spec; then one whose part
// has another size than before, and one whose part no pool holds.
inline const std::vector<ManifestKind>& manifest_kinds() {
  static const std::vector<ManifestKind> kinds{
      {1, 1, {{1, 40}}},   {1, 2, {{1, 40}, {2, 100}}},  {1, 3, {{3, 5000}, {4, 9000}}},
      {2, 4, {{1, 40}}},   {1, 5, {{1, 41}}},            {1, 6, {{5, uint64_t{1} << 40}}},
  };
  return kinds;
}

inline constexpr uint32_t kChains = 3, kChainBlocks = 7;

// The third chain leaves the first after two blocks.
inline Hash hash_at(uint32_t chain, uint32_t block) {
  Hash hash{};
  hash.bytes[0] = static_cast<uint8_t>(chain == 2 && block < 2 ? 1 : chain + 1);
  hash.bytes[1] = static_cast<uint8_t>(block + 1);
  return hash;
}

// The identity of the bytes of one part of one block. With the same names, tenants have other bytes.
struct Content {
  uint32_t tenant;
  uint8_t spec;
  Hash hash;
  PartKind part;

  const std::string& bytes() const { return known().bytes; }
  uint32_t crc() const { return known().crc; }
  bool is(const uint8_t* data) const {
    return std::memcmp(bytes().data(), data, bytes().size()) == 0;
  }

 private:
  struct Known {
    std::string bytes;
    uint32_t crc;
  };
  // Made once: fuzzing is mostly asking for them.
  const Known& known() const {
    using Name = std::array<uint64_t, 4>;
    static std::map<Name, Known> all;
    const Name name{tenant, spec, hash.bytes[0] * 256u + hash.bytes[1], part.digest};
    const auto [found, fresh] = all.try_emplace(name);
    if (fresh) {
      const size_t seed = tenant * 101u + spec * 57u + hash.bytes[0] * 31u + hash.bytes[1] * 17u;
      std::string& bytes = found->second.bytes;
      bytes.resize(part.bytes);
      for (size_t i = 0; i < bytes.size(); ++i)
        bytes[i] = static_cast<char>(seed + part.digest * 7u + i * 13u + (i >> 8));
      found->second.crc = crc32c(bytes.data(), bytes.size());
    }
    return found->second;
  }
};

}  // namespace kv::fuzz
