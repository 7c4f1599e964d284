// The clock of everything that waits: monotonic. The time is passed as an argument: tests choose
// it.
#pragma once

#include <chrono>

namespace kv {

using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;

}  // namespace kv
