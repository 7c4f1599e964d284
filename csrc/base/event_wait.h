// How a loop waits for its events: awake where that will be short, else asleep.
#pragma once

#include <sys/epoll.h>

#include <chrono>
#include <span>

namespace kv {

// Whether the next wait will be short, judged by the last few.
class ShortWaits {
 public:
  using Duration = std::chrono::steady_clock::duration;

  // About what a sleep costs both sides: two switches of tasks here, and an interrupt to this core
  // that the peer pays for. Who stays awake for as long never pays more than twice the least.
  static constexpr std::chrono::microseconds kMostAwake{20};
  // What a short wait took where it was slept through: the waking is part of it.
  static constexpr std::chrono::microseconds kMostAsleep{30};

  bool expected() const { return share_ > 0.5; }
  // A wait has ended, which began awake or not.
  void ended(Duration waited, bool awake) {
    const bool was_short = waited <= (awake ? kMostAwake : kMostAsleep);
    share_ += ((was_short ? 1.0 : 0.0) - share_) * kWeight;
  }

 private:
  static constexpr double kWeight = 1.0 / 8;
  double share_ = 0;  // of short waits, the last ones counting most
};

class EventWait {
 public:
  // As epoll_wait(2), which is asked again and again for a moment first where that pays.
  int wait(int epoll, std::span<epoll_event> events, int timeout_ms);

 private:
  ShortWaits short_waits_;
};

}  // namespace kv
