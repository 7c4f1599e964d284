// Work of one call that several threads share.
#include "base/parallel.h"

#include <atomic>
#include <vector>

#include "check.h"

namespace {

using namespace kv;

void each_is_done_once_and_all_when_the_call_ends() {
  for (const size_t count : {0, 1, 3, 5000})
    for (unsigned threads = 1; threads <= 8; ++threads) {
      std::vector<int> done(count);
      in_parallel(count, threads, [&done](size_t i) { ++done[i]; });
      CHECK(done == std::vector<int>(count, 1));
    }
}

void threads_share_the_work() {
  std::atomic<int> waiting{0};
  in_parallel(4, 4, [&waiting](size_t) {
    ++waiting;
    while (waiting != 4) std::this_thread::yield();
  });
}

void few_bytes_are_copied_by_one_thread() {
  CHECK(copy_threads(0) == 1 && copy_threads(1 << 20) == 1);
  CHECK(copy_threads(uint64_t{1} << 40) <= 8);
}

}  // namespace

int main() {
  each_is_done_once_and_all_when_the_call_ends();
  threads_share_the_work();
  few_bytes_are_copied_by_one_thread();
  return 0;
}
