#include "server/poller.h"

#include "base/event_fd.h"
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

// An event that is always there from signal() to clear().
struct Rig {
  Rig() {
    CHECK(poller.open() == 0 && event.open() == 0);
    CHECK(poller.add(event.get(), Poller::kFence, EPOLLIN, 7) == 0);
  }
  // Returns how many events there were.
  int wait(int timeout_ms) {
    const int count = poller.wait(timeout_ms);
    poller.each(count, [](Poller::Kind kind, uint64_t id, uint32_t events) {
      CHECK(kind == Poller::kFence && id == 7 && events == EPOLLIN);
    });
    return count;
  }

  Poller poller;
  EventFd event;
};

void what_has_happened_is_found_awake_and_asleep() {
  Rig rig;
  rig.event.signal();
  for (int i = 0; i < 100; ++i) CHECK(rig.wait(60'000) == 1);
}

void where_nothing_happens_the_timeout_ends_it() {
  Rig rig;
  CHECK(rig.wait(0) == 0);
  CHECK(rig.wait(1) == 0);
  rig.event.signal();
  for (int i = 0; i < 100; ++i) CHECK(rig.wait(60'000) == 1);
  rig.event.clear();
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
