// Runs of blocks that are being brought from the disk, and what is to be done when they are there.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "disk/tier.h"
#include "table/table.h"
#include "table/waits.h"
#include "wire/wire.h"

namespace kv {

// A leading run that somebody wants in memory.
struct DiskRun {
  enum class Kind : uint8_t {
    kAnnounced,  // nobody is answered
    kRequest,    // an ACQUIRE or a GET
    kLanding,    // a WAIT that has landed and wants a lease
  };
  Kind kind = Kind::kAnnounced;
  uint64_t session = 0;
  wire::Header header{};
  uint32_t manifest_id = 0;
  uint16_t part = 0;
  std::unique_ptr<Wait> wait;
  uint32_t spec_id = 0;
  PartIds parts;
  std::vector<Hash> hashes;
  TimePoint deadline{};

  HashSpan span() const { return {hashes.data(), static_cast<uint32_t>(hashes.size())}; }

 private:
  friend class DiskRuns;
  uint64_t id = 0;
  uint32_t next = 0;     // blocks before it are pinned in memory, or awaited
  uint32_t end = 0;      // blocks from it on cannot be had
  uint32_t awaited = 0;
  std::vector<Block*> pinned;
};

// Each run asks for its blocks in prefix order, a window of them at a time, and holds those that are
// there so that nothing pushes them out before the last has come. It is over when its blocks are in
// memory up to the first that cannot be had, or at its deadline. Runs that were handed back hold
// their blocks until they are let_go().
class DiskRuns {
 public:
  static constexpr size_t kMaxRuns = 1024;
  static constexpr size_t kMaxAnnounced = 64;
  static constexpr size_t kMaxHashes = 1u << 20;  // of all
  static constexpr uint32_t kWindow = 64;

  using Ended = std::vector<std::unique_ptr<DiskRun>>;

  DiskRuns(Table& memory, DiskTier& disk) : memory_(memory), disk_(disk) {}

  // Whether one more of this kind and length may be added.
  bool has_room(DiskRun::Kind kind, size_t hashes) const;
  // Null if the run is under way; else the run itself: nothing of it can be brought.
  std::unique_ptr<DiskRun> add(std::unique_ptr<DiskRun> run);
  // A block came, or does not come. The runs that are over by that.
  Ended changed(const BlockKey& key);
  Ended expired(TimePoint now);
  Ended all();  // and none is left
  void drop_session(uint64_t session);
  void let_go(DiskRun& run);

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
  std::set<uint64_t> starved_;  // wait until less is being read
};

}  // namespace kv
