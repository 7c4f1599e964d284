// Forgets all blocks of a table, as the node does in turns.
#pragma once

#include <cstdint>
#include <vector>

#include "table/table.h"

namespace kv::test {

template <class Blocks>
std::vector<BlockKey> keys_of(const Blocks& blocks) {
  std::vector<BlockKey> keys;
  for (Table::Sweep sweep; blocks.next_keys(sweep, keys);) continue;
  return keys;
}

// How many went.
inline uint64_t purge(Table& table) {
  uint64_t removed = 0;
  for (const BlockKey& key : keys_of(table)) removed += table.remove(key) ? 1 : 0;
  return removed;
}

}  // namespace kv::test
