// Promotion: parts that lie on the disk are read into slots of the memory, checked and committed.
#pragma once

#include "base/clock.h"
#include "disk/counters.h"
#include "disk/index.h"
#include "disk/io.h"
#include "table/table.h"

namespace kv {

// One read per part, for any number of requests. The slot is reserved when the read is requested.
// The part becomes visible when the CRC32C of its bytes is the recorded one.
class DiskReader {
 public:
  static constexpr size_t kMaxReads = 32;  // in flight
  // Of one part in a row, after which its block is forgotten: the disk may be well again by then.
  static constexpr unsigned kMostErrors = 3;
  static constexpr size_t kMostRemembered = 4096;  // parts with errors
  static constexpr uint64_t kSession =
      ~uint64_t{0};  // reserves slots as this; no connection has it

  DiskReader(Table& memory, DiskIndex& index, uint8_t* pool, int fd, uint64_t most_bytes,
             DiskCounters& counters);

  bool has_room() const { return bytes_ < most_bytes_; }
  enum class Start {
    kReading,  // now, or already
    kThere,    // in memory already
    kNoSpace,  // no slot, even after eviction
    kAbsent,   // not on the disk, or a client is writing it
  };
  Start start(const BlockKey& key, uint32_t part_id, TimePoint now);
  bool reading(const PartKey& key) const { return reads_.contains(key); }
  // Parts of this block that are being read do not become visible.
  void cancel(const BlockKey& key);
  // Gives up reads that have not been submitted. Returns their blocks.
  std::vector<BlockKey> abandon();

  // `ended`: completions that were taken and not yet given to complete().
  void pump(DiskIo& io, TimePoint now, size_t ended = 0);
  enum class End { kNotOurs, kPromoted, kCancelled, kFailed, kCorrupt };
  struct Ended {
    End end = End::kNotOurs;
    BlockKey key{};
  };
  Ended complete(const DiskCompletion& done, TimePoint now);

  size_t waiting() const { return reads_.size(); }
  std::optional<TimePoint> oldest() const;

 private:
  struct Read {
    Slot slot;                // in memory
    Slot extent;              // on the disk
    Block* source = nullptr;  // in the disk's index, pinned
    uint32_t crc = 0;
    bool cancelled = false;
    TimePoint since{};      // requested
    TimePoint submitted{};  // if in flight
  };
  void end(const PartKey& key, const Read& read, bool keep);
  bool may_recover(const PartKey& key);

  Table& memory_;
  DiskIndex& index_;
  uint8_t* pool_;
  int fd_;
  uint64_t most_bytes_;
  DiskCounters& counters_;
  uint64_t bytes_ = 0;
  uint64_t last_id_;
  std::unordered_map<PartKey, Read, PartKeyHash> reads_;
  std::unordered_map<PartKey, unsigned, PartKeyHash> errors_;  // since each could be read
  std::deque<PartKey> queue_;                     // of reads_, not submitted
  std::unordered_map<uint64_t, PartKey> flying_;  // by request id
};

}  // namespace kv
