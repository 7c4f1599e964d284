// The records of one journal file that are yet to be written.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_set>

#include "disk/journal/names.h"
#include "disk/journal/records.h"

namespace kv {

// Defines specs and parts in front of the first record that needs them.
struct JournalStream {
  uint32_t seed = 0;
  std::string collected;
  std::unordered_set<uint32_t> specs;  // defined in this file
  std::unordered_set<uint32_t> parts;

  // Begins a file, with an id of its own.
  void begin(const DiskGeometry& geometry);
  // The entry's spec and part are in `names`.
  void put(const DiskEntry& entry, const DiskNames& names);
  void remove(const DiskRemoval& removal);
};

}  // namespace kv
