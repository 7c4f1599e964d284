// Requests that wait until blocks have landed. Takes the time as an argument.
#pragma once

#include <deque>
#include <set>

#include "base/clock.h"
#include "base/turn.h"
#include "table/registry.h"
#include "table/table.h"

namespace kv {

struct Wait {
  uint64_t session = 0;
  uint64_t request_id = 0;
  uint32_t spec_id = 0;
  PartIds parts;
  std::vector<Hash> hashes;  // the first `upto` of the request
  bool lease = false;
  TimePoint deadline;
  uint32_t reached = 0;  // blocks before it were complete at the last check
  TimePoint since{};
  bool stands = false;     // it waits for its block `reached`; else it is being checked
  bool from_start = true;  // it is being checked from the first block on

  HashSpan span() const { return {hashes.data(), static_cast<uint32_t>(hashes.size())}; }
};

// Each wait stands at its first missing block; a commit of a part of that makes it be checked
// again.
class Waits {
 public:
  using Ended = std::vector<std::unique_ptr<Wait>>;

  // Returns how many leading blocks exist.
  using Match = std::function<uint32_t(uint32_t spec_id, const PartIds& parts, HashSpan hashes)>;

  explicit Waits(Match match) : match_(std::move(match)) {}

  bool has(uint64_t session, uint64_t request_id) const {
    return waits_.contains({session, request_id});
  }
  // The wait is to be checked.
  void add(std::unique_ptr<Wait> wait);
  // A part of this block was committed: the waits that stand there are to be checked.
  void committed(const BlockKey& key);
  // Checks waits for as long as the turn lasts. Returns the next one that has landed, or null.
  std::unique_ptr<Wait> landed(Turn& turn);
  bool looking() const { return !looking_.empty(); }
  Ended expired(TimePoint now);
  Ended all();  // none is left
  std::unique_ptr<Wait> cancel(uint64_t session, uint64_t request_id);
  size_t drop_session(uint64_t session);

  std::optional<TimePoint> next_deadline() const;
  size_t size() const { return waits_.size(); }

 private:
  using Id = std::pair<uint64_t, uint64_t>;  // session, request

  bool look(Wait& wait, Turn& turn);
  std::unique_ptr<Wait> take(Id id);

  Match match_;
  std::map<Id, std::unique_ptr<Wait>> waits_;
  std::unordered_multimap<BlockKey, Id, BlockKeyHash> standing_;
  std::deque<Id> looking_;  // to be checked; some may have ended
  std::set<std::pair<TimePoint, Id>> deadlines_;
};

}  // namespace kv
