// Whether the disk is used: what makes the node bypass it, and when it is tried again. Takes the
// time as an argument and does no I/O.
#pragma once

#include <array>
#include <optional>

#include "base/clock.h"

namespace kv {

enum class DiskFault : uint8_t { kFull, kReadErrors, kWriteErrors, kSlow, kJournal, kSync };
inline constexpr std::array<const char*, 6> kDiskFaultNames{
    "full", "read_errors", "write_errors", "slow", "journal", "sync_errors"};

// Up until a fault; then bypassed, with growing pauses between trials, from one second to a minute.
//
// A single block that cannot be written is not kept, nor one that cannot be read several times;
// several errors in a row are a fault of the disk. A disk that is full or slow, fails to sync or
// has a failed journal, is bypassed at once.
class DiskHealth {
 public:
  static constexpr unsigned kErrorsInARow = 3;
  static constexpr auto kFirstPause = std::chrono::seconds(1);
  static constexpr auto kLongestPause = std::chrono::seconds(60);

  bool up() const { return !fault_; }
  std::optional<DiskFault> fault() const { return fault_; }

  // An operation succeeded: a read if `read`, else a write.
  void succeeded(bool read) { errors_[read ? 1 : 0] = 0; }
  // True: the disk is bypassed from now on. False: it was before, or is still used.
  bool failed(DiskFault fault, TimePoint now);

  bool trial_due(TimePoint now) const { return fault_ && !trying_ && now >= next_trial_; }
  // When it is to be tried, if it is bypassed and not being tried.
  std::optional<TimePoint> next_trial() const;
  void trial_began() { trying_ = true; }
  // The disk is up again if it went well; else it is bypassed for longer.
  void trial_ended(bool well, TimePoint now);

 private:
  std::optional<DiskFault> fault_;
  bool trying_ = false;
  unsigned errors_[2] = {0, 0};
  Clock::duration pause_ = kFirstPause;
  TimePoint next_trial_{};
  TimePoint up_since_{};
};

}  // namespace kv
