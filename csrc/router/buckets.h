// A histogram as in Prometheus: values counted by upper bounds. One thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace kv {

class Buckets {
 public:
  // `bounds` ascend; the last count is of values above all of them.
  explicit Buckets(std::vector<double> bounds)
      : bounds_(std::move(bounds)), counts_(bounds_.size() + 1) {}
  void observe(double value, uint64_t times) {
    const auto at = std::lower_bound(bounds_.begin(), bounds_.end(), value) - bounds_.begin();
    counts_[static_cast<size_t>(at)] += times;
    sum_ += value * static_cast<double>(times);
  }
  const std::vector<uint64_t>& counts() const { return counts_; }  // not cumulative
  double sum() const { return sum_; }

 private:
  std::vector<double> bounds_;
  std::vector<uint64_t> counts_;
  double sum_ = 0;
};

}  // namespace kv
