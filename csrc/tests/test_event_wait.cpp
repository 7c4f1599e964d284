#include <sys/eventfd.h>
#include <unistd.h>

#include <array>

#include "base/event_wait.h"
#include "base/file.h"
#include "check.h"

namespace {

using namespace kv;
using std::chrono::microseconds;

constexpr microseconds kMoment{1};
constexpr microseconds kLong{1000};

void a_loop_without_history_sleeps() { CHECK(!ShortWaits().expected()); }

void after_some_short_waits_a_loop_stays_awake() {
  ShortWaits waits;
  for (int i = 0; i < 8; ++i) waits.ended(kMoment, waits.expected());
  CHECK(waits.expected());
}

void a_wait_that_was_slept_through_may_take_the_waking_longer() {
  ShortWaits asleep, awake;
  for (int i = 0; i < 8; ++i) {
    asleep.ended(ShortWaits::kMostAsleep, false);
    awake.ended(ShortWaits::kMostAsleep, true);
  }
  CHECK(asleep.expected());
  CHECK(!awake.expected());
}

void staying_awake_in_vain_ends_after_a_few_waits() {
  ShortWaits waits;
  for (int i = 0; i < 1000; ++i) waits.ended(kMoment, waits.expected());
  int in_vain = 0;
  for (; waits.expected(); ++in_vain) waits.ended(kLong, true);
  CHECK(in_vain > 0 && in_vain < 8);
}

void one_long_wait_among_short_ones_changes_nothing() {
  ShortWaits waits;
  for (int i = 0; i < 100; ++i) waits.ended(kMoment, waits.expected());
  waits.ended(kLong, true);
  CHECK(waits.expected());
}

// An event that is always there, until it has been read.
struct Rig {
  Rig() : epoll(epoll_create1(EPOLL_CLOEXEC)), event(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    epoll_event asked{EPOLLIN, {.u64 = 7}};
    CHECK(epoll_ctl(epoll.get(), EPOLL_CTL_ADD, event.get(), &asked) == 0);
  }
  void happen() {
    const uint64_t one = 1;
    CHECK(write(event.get(), &one, sizeof one) == sizeof one);
  }
  int wait(int timeout_ms) { return events.wait(epoll.get(), found, timeout_ms); }

  File epoll, event;
  EventWait events;
  std::array<epoll_event, 4> found{};
};

void what_has_happened_is_found_awake_and_asleep() {
  Rig rig;
  rig.happen();
  for (int i = 0; i < 100; ++i) {
    CHECK(rig.wait(60'000) == 1);
    CHECK(rig.found[0].data.u64 == 7);
  }
}

void where_nothing_happens_the_timeout_ends_it() {
  Rig rig;
  CHECK(rig.wait(0) == 0);
  CHECK(rig.wait(1) == 0);
  rig.happen();
  for (int i = 0; i < 100; ++i) CHECK(rig.wait(60'000) == 1);
  uint64_t read_here = 0;
  CHECK(read(rig.event.get(), &read_here, sizeof read_here) == sizeof read_here);
  for (int i = 0; i < 20; ++i) CHECK(rig.wait(1) == 0);  // awake first, then asleep
}

}  // namespace

int main() {
  a_loop_without_history_sleeps();
  after_some_short_waits_a_loop_stays_awake();
  a_wait_that_was_slept_through_may_take_the_waking_longer();
  staying_awake_in_vain_ends_after_a_few_waits();
  one_long_wait_among_short_ones_changes_nothing();
  what_has_happened_is_found_awake_and_asleep();
  where_nothing_happens_the_timeout_ends_it();
}
