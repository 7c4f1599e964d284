// Write-behind: parts committed in memory are written to the disk, parents first, without a copy.
#pragma once

#include <set>

#include "base/clock.h"
#include "disk/counters.h"
#include "disk/index.h"
#include "disk/io.h"
#include "table/table.h"

namespace kv {

// A part waits in a queue; its block is pinned, up to `pinned_bytes` (a block that is not pinned
// may be evicted meanwhile, and is then skipped). It is written; then a sync covers all writes
// before it; then it is recorded, and durable when the journal is. After a sync that failed nothing
// that was written since the last good one is recorded: the kernel reports an error once, and may
// have dropped what it could not write, so that the next sync would succeed without it.
class DiskWriter {
 public:
  static constexpr size_t kMaxQueued = 65536;
  static constexpr size_t kMaxWrites = 8;        // in flight
  static constexpr size_t kMaxWritesBeside = 2;  // while requests wait for reads

  // `digests`: parts in memory have CRC32Cs; else this computes those that it records.
  DiskWriter(Table& memory, DiskIndex& index, uint8_t* pool, int fd, uint64_t pinned_bytes,
             DiskCounters& counters, bool digests = true);

  // A part of a block in memory is committed.
  void add(Block& block, uint32_t part_id);
  // Adds all that is in memory and not on the disk. Returns the mark for flushed().
  uint64_t add_all();
  // Everything up to `mark` is durable, or was skipped and counted.
  bool flushed(uint64_t mark) const { return outstanding_.empty() || *outstanding_.begin() > mark; }
  // Parts of this block that are being written are not recorded.
  void cancel(const BlockKey& key);
  // Skips parts that are not being written yet: the disk is bypassed.
  void abandon(DiskSkip why);

  // Submits writes and syncs. `beside_reads`: fewer, since requests wait for reads. True: more may
  // be submitted at once, in another turn (each computes one digest at most).
  bool pump(DiskIo& io, bool beside_reads, TimePoint now);
  // Records the synced parts. False: the journal takes no record now.
  bool record();
  struct Done {
    bool ours = false;
    bool sync = false;
  };
  // Handles a completion, if it is of this writer.
  Done complete(const DiskCompletion& done);
  // The journal's durable() may have moved.
  void advance(uint64_t durable);

  size_t queued() const { return queue_.size(); }
  size_t writing() const { return writing_.size(); }
  // Written or being written, and not recorded.
  uint64_t unrecorded() const {
    return writing_.size() + written_.size() + syncing_.size() + synced_.size();
  }
  // When the oldest operation in flight began.
  std::optional<TimePoint> oldest() const;

 private:
  struct Queued {
    PartKey key;
    uint64_t mark;
    Block* pinned;  // or null
    uint64_t bytes;
  };
  struct Writing {
    PartKey key;
    uint64_t mark = 0;
    Block* block = nullptr;  // pinned until it is written
    uint32_t generation = 0;
    uint32_t crc = 0;
    uint64_t bytes = 0;
    bool cancelled = false;
    bool distrusted = false;  // a sync failed while it was written
    TimePoint since{};
  };
  struct Recorded {
    uint64_t sequence;
    uint64_t mark;
  };
  void add(Block& block, uint32_t part_id, size_t most);
  void add_chain(Block& block, std::unordered_set<const Block*>& seen);
  bool submit_next(DiskIo& io, TimePoint now);
  bool write(DiskIo& io, const Queued& next, Block& block, const Part& part, const Slot& extent,
             TimePoint now);
  void end_queued(const Queued& entry);
  void skip(uint64_t mark, DiskSkip why);
  void drop(const Writing& one, bool failed);
  void distrust();
  void submit_sync(DiskIo& io, TimePoint now);

  Table& memory_;
  DiskIndex& index_;
  uint8_t* pool_;
  int fd_;
  uint64_t most_pinned_bytes_;
  DiskCounters& counters_;
  bool digests_;
  uint64_t pinned_bytes_ = 0;
  uint64_t last_mark_ = 0;
  uint64_t last_id_ = 0;
  std::deque<Queued> queue_;
  std::unordered_set<PartKey, PartKeyHash> waiting_;  // the names of queue_
  std::set<uint64_t> outstanding_;                    // marks of parts neither durable nor skipped
  std::unordered_map<uint64_t, Writing> writing_;     // by request id
  std::vector<Writing> written_;                      // and not synced
  std::vector<Writing> syncing_;
  bool sync_in_flight_ = false;
  uint64_t sync_id_ = 0;
  TimePoint sync_since_{};
  std::deque<Writing> synced_;  // and not recorded
  std::deque<Recorded> recorded_;
};

}  // namespace kv
