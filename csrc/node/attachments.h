// Connections that move blocks with RDMA: who wishes to, and who can still reach the pool. What makes
// and ends their queue pairs is the host, outside of kvcore: it takes events and says what it did.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/file.h"

namespace kv {

// What the host has to do: make a queue pair for a session that shows this card, or end the one it has.
struct AttachEvent {
  uint64_t session = 0;
  bool begins = false;
  uint32_t rail = 0;
  std::string card;
};

// One entry for each session from its ATTACH until its queue pair is known to be gone. Not
// thread-safe.
class Attachments {
 public:
  // From now on sessions may attach, at most `most` at a time; with 0 none any more. 0 or an errno.
  int offer(size_t most);
  bool offered() const { return most_ != 0; }
  bool full() const { return entries_.size() >= most_; }
  size_t size() const { return entries_.size(); }
  // Readable while there are events. -1 before the first offer.
  int ready_fd() const { return ready_.get(); }

  // A session asks; not when full().
  void ask(uint64_t session, uint64_t request_id, uint32_t rail, std::string_view card);
  // All events since the last time.
  std::vector<AttachEvent> take_events();
  // The session has its queue pair. The id of its request; nothing if it is not asking (any more): then
  // the host is told to end what it made.
  std::optional<uint64_t> attached(uint64_t session);
  // It gets none, and its entry goes. As above.
  std::optional<uint64_t> refused(uint64_t session);
  // The session is gone. True if it may have had a queue pair, which the host is told to end; until then
  // its entry, and what `fence` stands for, stay.
  bool ended(uint64_t session);
  void fence_with(uint64_t session, uint64_t fence);
  // Of a session that has ended: its queue pair is gone, and so is its entry. The fence, if there is one.
  std::optional<uint64_t> fenced(uint64_t session);

 private:
  enum class Phase { kQueued, kTaken, kAttached, kEnded };
  struct Entry {
    uint64_t request_id = 0;
    Phase phase = Phase::kQueued;
    std::optional<uint64_t> fence;
  };
  Entry* find(uint64_t session);
  void push(AttachEvent event);

  size_t most_ = 0;
  File ready_;
  std::unordered_map<uint64_t, Entry> entries_;
  std::deque<AttachEvent> events_;
};

}  // namespace kv
