// What a journal of the SSD tier says: specs, parts, and where the parts of blocks lie.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "wire.h"

namespace kv {

// What the extents of a data file can be. A journal is of one geometry.
struct DiskGeometry {
  uint64_t data_id = 0;        // DiskFile::id()
  uint64_t data_bytes = 0;     // extents end here; a multiple of the granule
  uint32_t granule_bytes = 0;  // extents begin at multiples; power of two, 4..64 KiB
  bool operator==(const DiskGeometry&) const = default;
  uint64_t extent_bytes(uint64_t bytes) const {
    return (bytes + granule_bytes - 1) / granule_bytes * granule_bytes;
  }
};

// Numbers are the journal's, from 1: those of a running node's registry are others.
struct DiskSpec {
  uint32_t number = 0;
  std::string tenant;  // its name; "" where the node has none
  wire::Hash digest{};
};

struct DiskPart {
  uint32_t number = 0;
  uint32_t spec = 0;
  wire::Hash digest{};
  uint64_t bytes = 0;
};

// One part of one block, and where it lies.
struct DiskEntry {
  uint32_t spec = 0;
  uint32_t part = 0;
  wire::Hash hash{};
  std::optional<wire::Hash> parent;
  uint64_t offset = 0;    // as Slab counts: from DiskFile::kDataOffset
  uint64_t bytes = 0;     // the part's; the extent has them rounded up to granules
  uint32_t crc = 0;       // CRC32C of the part's bytes
  uint64_t sequence = 0;  // grows with time, over restarts too: the latest put is the highest
};

// What a journal says in the end. Every entry's spec and part are there, its extent is in range and
// aligned, no two extents overlap, and no (block, part) is there twice.
struct DiskContents {
  std::vector<DiskSpec> specs;
  std::vector<DiskPart> parts;
  std::map<uint64_t, DiskEntry> entries;  // by offset
  uint64_t last_sequence = 0;
};

}  // namespace kv
