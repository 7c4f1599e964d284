// Whether the disk is used: what puts it aside, and when it is tried again. Takes the time as an
// argument and does no I/O.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <optional>

#include "base/clock.h"

namespace kv {

// Why the disk is bypassed.
enum class DiskFault : uint8_t { kFull, kReadErrors, kWriteErrors, kSlow, kJournal };
inline constexpr std::array<const char*, 5> kDiskFaultNames{"full", "read_errors", "write_errors",
                                                            "slow", "journal"};

// Up until a fault; then bypassed, with pauses between trials that grow from one second to a minute.
//
// One block that cannot be read or written is that block's loss. Errors in a row are the disk's. A
// disk that is full, slow, or whose journal failed is put aside at once.
class DiskHealth {
 public:
  static constexpr unsigned kErrorsInARow = 3;
  static constexpr auto kFirstPause = std::chrono::seconds(1);
  static constexpr auto kLongestPause = std::chrono::seconds(60);

  bool up() const { return !fault_; }
  std::optional<DiskFault> fault() const { return fault_; }

  // An operation succeeded: of reads if `read`, else of writes.
  void succeeded(bool read) { errors_[read ? 1 : 0] = 0; }
  // True if this put the disk aside; false if it is aside already, or goes on.
  bool failed(DiskFault fault, TimePoint now);

  // The disk is to be tried now.
  bool trial_due(TimePoint now) const { return fault_ && !trying_ && now >= next_trial_; }
  // When it will be, if it is aside and not being tried.
  std::optional<TimePoint> next_trial() const;
  void trial_began() { trying_ = true; }
  // It is up again if it went well; else aside for longer.
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
