// How a loop waits for its events: polling if the wait will be short, else asleep.
#pragma once

#include <sys/epoll.h>

#include <chrono>
#include <span>

namespace kv {

// Predicts from the last few waits whether the next one will be short.
class ShortWaits {
 public:
  using Duration = std::chrono::steady_clock::duration;

  // About the cost of a sleep: two task switches here, and the peer's interrupt to this core.
  // Polling for as long costs at most twice the optimum.
  static constexpr std::chrono::microseconds kMostAwake{20};
  // The length of a short wait spent asleep: with the wake-up.
  static constexpr std::chrono::microseconds kMostAsleep{30};

  bool expected() const { return share_ > 0.5; }
  // A wait has ended; `awake`: it began with polling.
  void ended(Duration waited, bool awake) {
    const bool was_short = waited <= (awake ? kMostAwake : kMostAsleep);
    share_ += ((was_short ? 1.0 : 0.0) - share_) * kWeight;
  }

 private:
  static constexpr double kWeight = 1.0 / 8;
  double share_ = 0;  // of short waits; the last ones count most
};

class EventWait {
 public:
  // As epoll_wait(2), but polls for a moment first if that pays.
  int wait(int epoll, std::span<epoll_event> events, int timeout_ms);

 private:
  ShortWaits short_waits_;
};

}  // namespace kv
