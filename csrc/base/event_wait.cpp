#include "base/event_wait.h"

#include "base/clock.h"

namespace kv {

int EventWait::wait(int epoll, std::span<epoll_event> events, int timeout_ms) {
  const auto ask = [&](int most_ms) {
    return epoll_wait(epoll, events.data(), static_cast<int>(events.size()), most_ms);
  };
  if (timeout_ms == 0) return ask(0);
  const bool awake = short_waits_.expected();
  const auto began = Clock::now();
  int count = 0;
  while (awake && count == 0 && Clock::now() - began < ShortWaits::kMostAwake) count = ask(0);
  if (count == 0) count = ask(timeout_ms);
  short_waits_.ended(Clock::now() - began, awake);
  return count;
}

}  // namespace kv
