// ATTACH: connections that move blocks by RDMA, and what the host has to do for them. The host,
// outside of this library, makes and ends the queue pairs: it takes events and reports what it did.
#pragma once

#include "base/event_fd.h"
#include "node/replies.h"

namespace kv {

// What the host has to do: make a queue pair for a session, which sent this card, or end its.
struct AttachEvent {
  uint64_t session = 0;
  bool begins = false;
  uint32_t rail = 0;
  std::string card;
};

// An entry for each session from its ATTACH until its queue pair is known to be gone.
class Attachments {
 public:
  Attachments(NodeState& state, Replies& replies) : state_(state), replies_(replies) {}

  bool attach(Session& session, const wire::Header& header, const wire::AttachRequest& request);
  // A session ends. True if it may have had a queue pair: the host gets an event to end it, and
  // `slots` stay fenced until then. `in_use`: it had blocks leased or reserved.
  bool end(const Session& session, bool in_use, std::vector<Slot>& slots);

  // For the host.
  // From now on sessions may attach, at most `most` at a time; 0: no further ones. 0 or an errno.
  int offer(size_t most);
  // Readable while there are events. -1 before the first offer.
  int ready_fd() const { return ready_.get(); }
  // All events since the last call.
  std::vector<AttachEvent> take_events();
  // The session has its queue pair, whose card (at most kMaxCardBytes) goes to the client. False:
  // the session is gone or did not ask, and an event to end the queue pair follows or has been
  // taken.
  bool attached(uint64_t session, std::string_view card);
  // It gets none. False as above.
  bool refuse(uint64_t session, wire::Status status, std::string_view why);
  // The queue pair of a session that has ended is gone: nothing accesses the pool through it.
  void fenced(uint64_t session);

  // Sessions that asked for a queue pair or may have one.
  size_t size() const { return entries_.size(); }

 private:
  enum class Phase { kQueued, kTaken, kAttached, kEnded };
  struct Entry {
    uint64_t request_id = 0;
    Phase phase = Phase::kQueued;
    std::optional<uint64_t> fence;
  };
  using Entries = std::unordered_map<uint64_t, Entry>;

  Session* answer(uint64_t id, bool attached, wire::Header& request);
  void push(AttachEvent event);
  void drop_events(uint64_t session);

  NodeState& state_;
  Replies& replies_;
  size_t most_ = 0;
  EventFd ready_;
  Entries entries_;  // by session
  std::vector<AttachEvent> events_;
};

}  // namespace kv
