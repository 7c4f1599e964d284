// Copies of many bytes by several threads: one does not reach the speed of memory, nor of a GPU's link.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

#include "base/quiet_thread.h"

namespace kv {

// How many threads are to copy so many bytes: at most half of the processors that this process may
// use, because an engine computes meanwhile. Beginning and ending one takes as long as some 100 KiB.
inline unsigned copy_threads(uint64_t bytes) {
  constexpr uint64_t kWorthAThread = 4u << 20;
  constexpr uint64_t kMost = 8;
  static const uint64_t half = [] {
    cpu_set_t own;
    return sched_getaffinity(0, sizeof own, &own) == 0 ? CPU_COUNT(&own) / 2 : 0;
  }();
  return static_cast<unsigned>(
      std::clamp<uint64_t>(std::min(half, bytes / kWorthAThread), 1, kMost));
}

// Calls each(i) once for each i < count, in this thread and further ones that end with the call.
template <class Each> void in_parallel(size_t count, unsigned threads, Each each) {
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) each(i);
  };
  std::vector<std::thread> others;
  others.reserve(threads);
  try {
    while (others.size() + 1 < std::min<size_t>(threads, count))
      others.push_back(quiet_thread(work));
  } catch (const std::system_error&) {
    // No more threads may be made: those that run do it.
  }
  work();
  for (std::thread& other : others) other.join();
}

}  // namespace kv
