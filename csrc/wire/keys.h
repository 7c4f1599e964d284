// The names of blocks and of their parts, as a node has them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "wire/wire.h"

namespace kv {

using wire::Hash;
using wire::HashSpan;

struct BlockKey {
  uint32_t spec_id = 0;
  Hash hash{};
  bool operator==(const BlockKey&) const = default;
};

// The block that one of this spec hangs on; nothing where `parent` is zeros: it begins a chain.
inline std::optional<BlockKey> parent_of(uint32_t spec_id, const Hash& parent) {
  if (parent == Hash{}) return std::nullopt;
  return BlockKey{spec_id, parent};
}
// A block that is its own ancestor could never be evicted.
inline bool may_hang(const Hash& hash, const Hash& parent) {
  return hash != parent && hash != Hash{};
}

// Keyed: clients choose the hashes.
struct BlockKeyHash {
  size_t operator()(const BlockKey& key) const;
};

struct PartKey {
  BlockKey block;
  uint32_t part_id = 0;
  bool operator==(const PartKey&) const = default;
};
struct PartKeyHash {
  size_t operator()(const PartKey& key) const { return BlockKeyHash{}(key.block) + key.part_id; }
};

}  // namespace kv
