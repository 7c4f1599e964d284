// What the server's loop waits for: descriptors, each with what it is; and how: polling if the wait
// will be short, else asleep.
#pragma once

#include <sys/epoll.h>

#include <array>
#include <cerrno>

#include "base/clock.h"
#include "base/file.h"

namespace kv {

// Predicts from the last few waits whether the next one will be short.
class ShortWaits {
 public:
  // About the cost of a sleep: two task switches here, and the peer's interrupt to this core.
  // Polling for as long costs at most twice the optimum.
  static constexpr std::chrono::microseconds kMostAwake{20};
  // The length of a short wait spent asleep: with the wake-up.
  static constexpr std::chrono::microseconds kMostAsleep{30};

  bool expected() const { return share_ > 0.5; }
  // A wait has ended; `awake`: it began with polling.
  void ended(Clock::duration waited, bool awake) {
    const bool was_short = waited <= (awake ? kMostAwake : kMostAsleep);
    share_ += ((was_short ? 1.0 : 0.0) - share_) * kWeight;
  }

 private:
  static constexpr double kWeight = 1.0 / 8;
  double share_ = 0;  // of short waits; the last ones count most
};

class Poller {
 public:
  enum Kind : uint64_t { kWake, kListenTcp, kListenUnix, kSession, kFence, kDisk };

  // 0 or an errno.
  int open() {
    epoll_.reset(epoll_create1(EPOLL_CLOEXEC));
    return epoll_ ? 0 : errno;
  }
  void close() { epoll_.reset(); }
  // A closed descriptor leaves by itself. 0 or an errno.
  int add(int fd, Kind kind, uint32_t events, uint64_t id = 0) {
    return control(EPOLL_CTL_ADD, fd, kind, events, id);
  }
  int change(int fd, Kind kind, uint32_t events, uint64_t id) {
    return control(EPOLL_CTL_MOD, fd, kind, events, id);
  }
  void remove(int fd) { epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr); }

  // Waits for events, awake for a moment first if that pays; returns how many there are.
  int wait(int timeout_ms) {
    if (timeout_ms == 0) return ask(0);
    const bool awake = short_waits_.expected();
    const TimePoint began = Clock::now();
    int count = 0;
    while (awake && count == 0 && Clock::now() - began < ShortWaits::kMostAwake) count = ask(0);
    if (count == 0) count = ask(timeout_ms);
    short_waits_.ended(Clock::now() - began, awake);
    return count;
  }
  template <class Visit> void each(int count, Visit visit) {
    for (int i = 0; i < count; ++i) {
      const uint64_t data = events_[static_cast<size_t>(i)].data.u64;
      const auto kind = static_cast<Kind>(data & ((1u << kKindBits) - 1));
      visit(kind, data >> kKindBits, events_[static_cast<size_t>(i)].events);
    }
  }

 private:
  static constexpr unsigned kKindBits = 3;  // the low bits of an event's data; above: the id

  int ask(int timeout_ms) {
    return epoll_wait(epoll_.get(), events_.data(), static_cast<int>(events_.size()), timeout_ms);
  }
  int control(int action, int fd, Kind kind, uint32_t events, uint64_t id) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = (id << kKindBits) | kind;
    return epoll_ctl(epoll_.get(), action, fd, &event) == 0 ? 0 : errno;
  }

  File epoll_;
  ShortWaits short_waits_;
  std::array<epoll_event, 128> events_{};
};

}  // namespace kv
