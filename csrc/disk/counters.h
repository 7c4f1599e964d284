// The counters of the disk tier. One thread writes; readers hold the node's mutex.
#pragma once

#include "disk/health.h"
#include "table/counters.h"

namespace kv {

// Why a part of a block was not written to the disk.
enum class DiskSkip : uint8_t { kQueueFull, kGone, kNoRoom, kBypassed, kFailed };
inline constexpr std::array<const char*, 5> kDiskSkipNames{"queue_full", "gone", "no_room",
                                                           "bypassed", "failed"};
enum class DiskError : uint8_t { kRead, kWrite, kSync, kJournal, kCorrupt };
inline constexpr std::array<const char*, 5> kDiskErrorNames{"read", "write", "sync", "journal",
                                                            "corrupt"};

inline constexpr std::array<uint64_t, 11> kPromotionBounds{
    100'000,    250'000,    500'000,     1'000'000,   2'500'000,    5'000'000,
    10'000'000, 50'000'000, 100'000'000, 500'000'000, 1'000'000'000};

struct DiskCounters {
  uint64_t written_bytes = 0, read_bytes = 0;
  uint64_t stored = 0;    // parts written and recorded
  uint64_t promoted = 0;  // parts brought back into memory
  uint64_t deleted = 0;   // blocks that a client deleted or purged
  uint64_t dropped = 0;   // blocks that could not be read, or had other bytes than were written
  uint64_t parked = 0;    // requests that waited for the disk
  uint64_t late = 0;      // of those, answered with fewer blocks at the deadline
  uint64_t announced = 0;
  CountsBy<DiskSkip, kDiskSkipNames.size()> skipped;
  CountsBy<DiskError, kDiskErrorNames.size()> errors;
  CountsBy<DiskFault, kDiskFaultNames.size()> bypasses;
  Histogram<kPromotionBounds> promotions;
};

// The state now. All zero without a disk.
struct DiskGauges {
  uint64_t bytes = 0, used_bytes = 0, blocks = 0, durable_blocks = 0, journal_bytes = 0;
  uint64_t queue = 0, reads = 0;
  uint64_t evictions = 0;  // because the disk was full; only grows
  CountsBy<DiskFault, kDiskFaultNames.size()> bypassed;
};

// kvrouter_store/node/metrics.py reads the names.
void add_disk_stats(StatList& list, const DiskGauges& gauges, const DiskCounters& counters);

}  // namespace kv
