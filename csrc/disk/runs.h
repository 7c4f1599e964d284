// Runs of blocks that are being brought from the disk, and what follows when they are in memory.
#pragma once

#include "disk/tier.h"
#include "table/table.h"

namespace kv {

// A leading run of blocks that is to be brought into memory.
struct DiskRun {
  using Then = std::function<void(HashSpan hashes)>;

  uint64_t session = 0;
  uint32_t spec_id = 0;
  PartIds parts;
  std::vector<Hash> hashes;
  TimePoint deadline{};
  Then
      then{};  // for the owner to call when the run is over; empty: announced, nothing waits for it

  bool announced() const { return !then; }
  HashSpan span() const { return {hashes.data(), static_cast<uint32_t>(hashes.size())}; }

  // Kept by DiskRuns.
  uint64_t id = 0;
  uint32_t next = 0;  // blocks before it are pinned in memory, or awaited
  uint32_t end = 0;   // blocks from here on cannot be brought
  uint32_t awaited = 0;
  std::vector<Block*> pinned{};
};

// Each run asks for its blocks in prefix order, a window of them at a time, and pins those that are
// in memory until the last one has come. A run is over when its blocks are in memory up to the
// first that cannot be brought, or at its deadline. A run that is over is returned to the owner and
// keeps its pins until let_go().
class DiskRuns {
 public:
  static constexpr size_t kMaxRuns = 1024;
  static constexpr size_t kMaxAnnounced = 64;
  static constexpr size_t kMaxHashes = 1u << 20;  // of all
  static constexpr uint32_t kWindow = 64;

  using Ended = std::vector<std::unique_ptr<DiskRun>>;

  DiskRuns(Table& memory, DiskTier& disk) : memory_(memory), disk_(disk) {}

  // Whether one more run of this length may be added.
  bool has_room(bool announced, size_t hashes) const;
  // Null if the run waits for blocks; the run itself if it is over at once.
  std::unique_ptr<DiskRun> add(std::unique_ptr<DiskRun> run);
  // A block was brought, or cannot be. Returns the runs that are over.
  Ended changed(const BlockKey& key);
  Ended expired(TimePoint now);
  Ended all();  // and none is left
  void drop_session(uint64_t session);
  void let_go(DiskRun& run);  // unpins its blocks

  std::optional<TimePoint> next_deadline() const;
  size_t size() const { return runs_.size(); }

 private:
  struct Standing {
    uint64_t run;
    uint32_t index;
  };
  bool over(const DiskRun& run) const { return run.awaited == 0 && run.next >= run.end; }
  void advance(DiskRun& run);
  void look_at(const BlockKey& key, std::set<uint64_t>& touched);
  std::unique_ptr<DiskRun> take(uint64_t id);

  Table& memory_;
  DiskTier& disk_;
  uint64_t last_id_ = 0;
  size_t announced_ = 0, hashes_ = 0;
  std::map<uint64_t, std::unique_ptr<DiskRun>> runs_;
  std::unordered_multimap<BlockKey, Standing, BlockKeyHash> standing_;
  std::set<std::pair<TimePoint, uint64_t>> deadlines_;
  std::set<uint64_t> starved_;  // wait until less is being read, the oldest first
};

}  // namespace kv
