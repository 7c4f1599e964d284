// The hosts in a fuzzed story. That of RDMA makes queue pairs late, or none, and ends them later
// still. That of tiers answers late, or never, and claims what it likes.
#pragma once

#include <algorithm>
#include <vector>

#include "node/node.h"
#include "story_peer.h"

namespace kv::fuzz {

// A writer that is gone for the server, and still writes.
struct Ghost {
  bool attached;
  uint64_t id;  // of its session where it was attached, else of its fence
  std::vector<Grant> grants;
};

class TierHost {
 public:
  explicit TierHost(Node& node) : node_(node) {}

  void turn(Choices& choices) {
    TierAsks& tiers = node_.tier_asks();
    if (!tiers.offered()) return expect(tiers.offer(1.0) == 0);
    for (const TierAsk& ask : tiers.take()) open_.push_back(ask.id);
    if (open_.empty()) return;
    const uint8_t choice = choices.u8();
    const auto chosen = open_.begin() + choice / 8 % static_cast<int>(open_.size());
    const uint64_t id = *chosen;
    open_.erase(chosen);
    if (choice % 8 != 7) tiers.answer(id, choice % 8);
  }

 private:
  Node& node_;
  std::vector<uint64_t> open_;  // heard of, and not answered
};

class Host {
 public:
  explicit Host(Node& node) : node_(node) {}

  // Takes the events, and answers one of the waiting sessions; without any, the host of tiers acts.
  void turn(Choices& choices) {
    for (const AttachEvent& event : node_.attachments().take_events())
      if (event.begins) waiting_.push_back(event.session);
    if (waiting_.empty()) return tiers_.turn(choices);
    const uint8_t choice = choices.u8();
    const auto chosen = waiting_.begin() + choice / 4 % static_cast<int>(waiting_.size());
    const uint64_t session = *chosen;
    waiting_.erase(chosen);
    const bool here = node_.find_session(session) != nullptr;
    if (choice % 4 == 3) {
      expect(node_.attachments().refuse(session, Status::kLimit, "none is left") == here);
    } else {
      expect(node_.attachments().attached(session, "a card") == here);
      if (here) pairs_.push_back(session);
    }
  }
  // Whether the node must ask for the end of this session's queue pair.
  bool knows(uint64_t session) const {
    return std::ranges::count(waiting_, session) + std::ranges::count(pairs_, session) != 0;
  }
  void end(uint64_t session) {
    std::erase(waiting_, session);
    std::erase(pairs_, session);
    node_.attachments().fenced(session);
  }

 private:
  Node& node_;
  std::vector<uint64_t> waiting_;  // heard of, and not answered
  std::vector<uint64_t> pairs_;
  TierHost tiers_{node_};
};

}  // namespace kv::fuzz
