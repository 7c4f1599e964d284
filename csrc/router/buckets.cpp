#include "router/buckets.h"

#include <algorithm>

namespace kv {

Buckets::Buckets(std::vector<double> bounds)
    : bounds_(std::move(bounds)), counts_(bounds_.size() + 1) {}

void Buckets::observe(double value, uint64_t times) {
  const auto at = std::lower_bound(bounds_.begin(), bounds_.end(), value) - bounds_.begin();
  counts_[static_cast<size_t>(at)] += times;
  sum_ += value * static_cast<double>(times);
}

}  // namespace kv
