// The innermost loop of a copy plan: runs of bytes at equal distances.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kv {

class RunCopy {
 public:
  // For copies of `total_bytes` in runs of at least `least_run_bytes`: what no cache will hold is
  // written past the caches, if the runs are long enough for that. Whoever reads the bytes in
  // another thread synchronises with this object's end, as for any other writes.
  RunCopy(uint64_t total_bytes, uint64_t least_run_bytes);
  ~RunCopy();
  RunCopy(const RunCopy&) = delete;
  RunCopy& operator=(const RunCopy&) = delete;

  // Copies `count` runs of `bytes`, each `to_stride` and `from_stride` behind the one before.
  void operator()(uint8_t* to, const uint8_t* from, uint64_t bytes, uint64_t count,
                  uint64_t to_stride, uint64_t from_stride) const;

 private:
  bool streams_;
};

}  // namespace kv
