// The clock of everything that waits: monotonic, and passed as an argument, so that tests choose
// it.
#pragma once

#include <chrono>

namespace kv {

using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;

}  // namespace kv
