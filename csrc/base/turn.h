// Requests of many blocks, waits, and the cleanup of ended connections are served in turns, so that
// one client does not keep the others waiting.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>

namespace kv {

// How many blocks one turn may still look at. A turn of kBlocks takes about half a millisecond.
class Turn {
 public:
  static constexpr uint32_t kBlocks = 512;

  explicit Turn(uint32_t blocks = kBlocks) : left_(blocks) {}
  static Turn endless() { return Turn(std::numeric_limits<uint32_t>::max()); }

  void spend(uint64_t blocks) { left_ -= static_cast<uint32_t>(std::min<uint64_t>(left_, blocks)); }
  uint32_t left() const { return left_; }
  bool over() const { return left_ == 0; }

 private:
  uint32_t left_;
};

// The next step of a request, for as long as the turn lasts. True: the last one; the reply is
// queued.
using TurnStep = std::function<bool()>;

// A request that goes on in the next turn of its connection.
struct Unfinished {
  TurnStep next;
  std::chrono::nanoseconds spent{0};
};

}  // namespace kv
