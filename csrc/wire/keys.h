// The keys of blocks and parts in a node.
#pragma once

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

// The key of the parent; nothing if `parent` is zeros: the block begins a chain.
inline std::optional<BlockKey> parent_of(uint32_t spec_id, const Hash& parent) {
  if (parent == Hash{}) return std::nullopt;
  return BlockKey{spec_id, parent};
}
// Whether a block may have this parent: a block that is its own ancestor could never be evicted.
inline bool may_hang(const Hash& hash, const Hash& parent) {
  return hash != parent && hash != Hash{};
}

// Randomly keyed, since clients choose the hashes.
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
