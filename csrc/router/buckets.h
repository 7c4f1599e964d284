// A histogram as in Prometheus: values counted by upper bounds. One thread.
#pragma once

#include <cstdint>
#include <vector>

namespace kv {

class Buckets {
 public:
  // `bounds` ascend; the last count is of values above all of them.
  explicit Buckets(std::vector<double> bounds);
  void observe(double value, uint64_t times);
  const std::vector<uint64_t>& counts() const { return counts_; }  // not cumulative
  double sum() const { return sum_; }

 private:
  std::vector<double> bounds_;
  std::vector<uint64_t> counts_;
  double sum_ = 0;
};

}  // namespace kv
