#include "wire/keys.h"

#include <cstring>

#include "base/random.h"

namespace kv {
namespace {

struct HashKeys {
  uint64_t word[4];
  HashKeys() {
    for (uint64_t& k : word) k = random_u64();
  }
};

__extension__ using Wide = unsigned __int128;

uint64_t fold(uint64_t a, uint64_t b) {
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

}  // namespace

size_t BlockKeyHash::operator()(const BlockKey& key) const {
  static const HashKeys keys;
  uint64_t word[4];
  std::memcpy(word, key.hash.bytes, sizeof word);
  return fold(word[0] ^ keys.word[0], word[1] ^ keys.word[1]) ^
         fold(word[2] ^ keys.word[2] ^ key.spec_id, word[3] ^ keys.word[3]);
}

}  // namespace kv
