// WAIT and CANCEL: clients that wait until blocks have landed.
#pragma once

#include "node/lookup.h"
#include "node/promotion.h"
#include "node/replies.h"
#include "table/waits.h"

namespace kv {

class Landings {
 public:
  static constexpr uint64_t kMaxWaits = 4096;           // per connection
  static constexpr uint64_t kMaxWaitHashes = 1u << 20;  // per connection

  Landings(NodeState& state, Replies& replies, Lookup& lookup, Promotion& promotion);

  bool wait(Session& session, const wire::Header& header, const wire::WaitRequest& request);
  bool cancel(Session& session, const wire::Header& header, const wire::CancelRequest& request);

  // A part of this block is in memory now.
  void committed(const BlockKey& key);
  // Goes on, for as long as the turn lasts, with waits that may have landed and with their replies.
  void go_on();
  // Whether go_on() has nothing to do.
  bool is_clear() const { return !waits_.looking() && ended_.empty(); }
  // Answers the waits whose deadline has passed with TIMEOUT.
  void expire();
  // Answers all waits with TIMEOUT: nothing can land any more.
  void end_all();
  void drop_session(const Session& session);

  std::optional<TimePoint> next_deadline() const { return waits_.next_deadline(); }
  // Waits that have not ended.
  size_t pending() const { return waits_.size(); }
  // With those that are being answered.
  size_t size() const { return waits_.size() + ended_.size(); }

 private:
  using SharedWait = std::shared_ptr<const Wait>;
  // A wait that has ended, and its reply so far.
  struct Ended {
    SharedWait wait;
    wire::Status status;
    Found found{};
    uint64_t lease_id = 0;
    const Block* end = nullptr;  // leased first: then nothing before it can be evicted
  };
  void land(SharedWait wait);
  void end(SharedWait wait, wire::Status status);
  void answer_ended();
  bool answer(Ended& ended, Turn& turn);
  bool in_memory(const Wait& wait) const;
  void count(Session& session, uint64_t hashes, bool begins);
  void count_landing(const Wait& wait, wire::Status status);

  NodeState& state_;
  Replies& replies_;
  Lookup& lookup_;
  Promotion& promotion_;
  Waits waits_;
  std::deque<Ended> ended_;
};

}  // namespace kv
