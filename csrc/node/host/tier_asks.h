// Blocks that this node lacks and that a tier below it may have. The host of the tiers, outside of
// this library, takes questions and answers them; the requests that need the blocks wait meanwhile.
#pragma once

#include <map>
#include <set>

#include "base/event_fd.h"
#include "node/state.h"

namespace kv {

struct TierAsk {
  uint64_t id = 0;
  bool load = false;  // the blocks are to be put into this node before the answer
  std::string tenant;
  Hash manifest{};
  std::vector<Hash> hashes;       // of the request
  std::vector<uint32_t> missing;  // places of hashes that the node lacks, ascending
};

// A question ends with its answer or at its deadline. The answer is handled by the loop.
class TierAsks {
 public:
  static constexpr size_t kMaxAsks = 4096;        // that have not ended
  static constexpr size_t kMaxHashes = 1u << 20;  // of all
  static constexpr double kAnnouncedTimes = 10;   // the usual patience, if nothing waits
  // The host's own client: what it reads and the node lacks is not asked of the host again.
  static constexpr std::string_view kHostName = "kvrouter tiers";

  // `found`: of the missing blocks, so many leading ones are in a tier, or in the node by now.
  using Then = std::function<void(HashSpan hashes, uint32_t found)>;

  explicit TierAsks(NodeState& state) : state_(state) {}

  // For the parts of the node.
  // Whether there is a host.
  bool offered() const { return timeout_.count() > 0; }
  // False, and `then` is not called: there is no host, nothing is missing, or too much is asked
  // already. Without `then` nothing waits.
  bool begin(uint64_t session, const Manifest& manifest, HashSpan hashes,
             std::vector<uint32_t> missing, bool load, Then then);
  // Calls `then` of what has been answered.
  void go_on();
  bool is_clear() const { return answered_.empty(); }
  // Ends what is past its deadline, with nothing found.
  void expire();
  // Forgets the questions of a session without calling `then`.
  void drop_session(uint64_t session);
  std::optional<TimePoint> next_deadline() const;

  // For the host.
  // From now on there is one; with a timeout of 0 there is none any more. 0 or an errno.
  int offer(double timeout_s);
  // Readable while there are questions. -1 before the first offer.
  int ready_fd() const { return ready_.get(); }
  // All questions since the last call.
  std::vector<TierAsk> take();
  // False: nothing waits for it any more.
  bool answer(uint64_t id, uint32_t found);
  // Whether the tier of this name answers now; stats tell it.
  void tell(const std::string& name, bool up) { up_[name] = up; }
  const std::map<std::string, bool>& up() const { return up_; }

 private:
  struct Pending {
    uint64_t session = 0;
    std::vector<Hash> hashes;
    uint32_t missing = 0;
    TimePoint until{};
    Then then;
  };
  using Entries = std::map<uint64_t, Pending>;
  void end(Entries::iterator at, uint32_t found);

  NodeState& state_;
  EventFd ready_;
  std::chrono::duration<double> timeout_{};
  std::map<std::string, bool> up_;
  uint64_t last_id_ = 0;
  size_t hashes_ = 0;
  Entries pending_;
  std::set<std::pair<TimePoint, uint64_t>> deadlines_;
  std::map<uint64_t, TierAsk> asks_;  // not taken
  std::vector<std::pair<uint64_t, uint32_t>> answered_;
};

}  // namespace kv
