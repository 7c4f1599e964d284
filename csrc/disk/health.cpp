#include "disk/health.h"

#include <algorithm>

namespace kv {

bool DiskHealth::failed(DiskFault fault, TimePoint now) {
  if (fault_) return false;
  const bool reads = fault == DiskFault::kReadErrors;
  if ((reads || fault == DiskFault::kWriteErrors) && ++errors_[reads ? 1 : 0] < kErrorsInARow)
    return false;
  // A disk that fails soon after it came back keeps its long pause.
  if (now - up_since_ > kLongestPause) pause_ = kFirstPause;
  fault_ = fault;
  trying_ = false;
  next_trial_ = now + pause_;
  return true;
}

std::optional<TimePoint> DiskHealth::next_trial() const {
  if (!fault_ || trying_) return std::nullopt;
  return next_trial_;
}

void DiskHealth::trial_ended(bool well, TimePoint now) {
  trying_ = false;
  pause_ = std::min<Clock::duration>(pause_ * 2, kLongestPause);
  if (well) {
    fault_.reset();
    errors_[0] = errors_[1] = 0;
    up_since_ = now;
  } else {
    next_trial_ = now + pause_;
  }
}

}  // namespace kv
