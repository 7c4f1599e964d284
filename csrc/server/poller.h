// What the server's loop waits for: descriptors, each with what it is.
#pragma once

#include <sys/epoll.h>

#include <array>
#include <cerrno>

#include "base/event_wait.h"
#include "base/file.h"

namespace kv {

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

  // Waits for events; returns how many there are.
  int wait(int timeout_ms) { return wait_.wait(epoll_.get(), events_, timeout_ms); }
  template <class Visit> void each(int count, Visit visit) {
    for (int i = 0; i < count; ++i) {
      const uint64_t data = events_[static_cast<size_t>(i)].data.u64;
      const auto kind = static_cast<Kind>(data & ((1u << kKindBits) - 1));
      visit(kind, data >> kKindBits, events_[static_cast<size_t>(i)].events);
    }
  }

 private:
  static constexpr unsigned kKindBits = 3;  // the low bits of an event's data; above: the id

  int control(int action, int fd, Kind kind, uint32_t events, uint64_t id) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = (id << kKindBits) | kind;
    return epoll_ctl(epoll_.get(), action, fd, &event) == 0 ? 0 : errno;
  }

  File epoll_;
  EventWait wait_;
  std::array<epoll_event, 128> events_{};
};

}  // namespace kv
