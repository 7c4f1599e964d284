// The disk under a node's memory: blocks that are on the disk only are brought into memory before a
// request for them is answered.
#pragma once

#include "disk/runs.h"
#include "disk/tier.h"
#include "node/host/feed.h"
#include "node/state.h"

namespace kv {

// Without open() there is no disk: nothing is ever brought.
class Promotion : private DiskEvents {
 public:
  // `arrived`: called for each part that was brought into memory, before the runs that wait for it.
  using Arrived = std::function<void(const BlockKey& key)>;
  Promotion(NodeState& state, Arrived arrived, Feeds* feeds = nullptr)
      : state_(state), arrived_(std::move(arrived)), feeds_(feeds) {}

  // Opens the disk, before the first request. Specs and parts found there get their ids back. 0 or
  // an errno, as DiskTier::open. `io`: in place of the real one.
  int open(DiskOptions options, std::unique_ptr<DiskIo> io = nullptr);
  // Makes a manifest's ids known to the disk.
  void name(const Manifest& manifest, const wire::RegisterRequest& request);

  // Brings a run of blocks; `run.then` is called when it is over. False, and `then` is not called,
  // if nothing of it can be brought or too much is being brought already.
  bool begin(DiskRun run);
  // A run of these hashes with the usual deadline.
  DiskRun run_of(uint64_t session, uint32_t spec_id, const PartIds& parts, HashSpan hashes,
                 DiskRun::Then then) const;
  // Begins to bring blocks before a client reads them, as a MATCH with `promote` asks for.
  void announce(const Manifest& manifest, HashSpan hashes);

  // A client has committed the part in memory: it is written to the disk later.
  void committed(const PartKey& key);
  // Forgets the runs of a session without calling `then`.
  void drop_session(uint64_t session);
  // Ends the runs whose deadline has passed.
  void expire();
  std::optional<TimePoint> next_deadline() const;

 private:
  void end(DiskRuns::Ended runs);
  void on_promoted(const BlockKey& key) override;
  void on_lost(const BlockKey& key) override;
  void on_bypassed() override;

  NodeState& state_;
  Arrived arrived_;
  Feeds* const feeds_;              // null: nobody is told what leaves the disk
  std::unique_ptr<DiskTier> disk_;  // null: there is none
  std::unique_ptr<DiskRuns> runs_;
};

}  // namespace kv
