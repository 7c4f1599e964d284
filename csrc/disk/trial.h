// The trial of a bypassed disk: a page that belongs to no block is written, synced and read back.
#pragma once

#include "disk/file.h"
#include "disk/io.h"
#include "memory/slab.h"

namespace kv {

class DiskTrial {
 public:
  enum class State { kIdle, kWriting, kSyncing, kReading, kWell, kBad };

  // Begins with a write to the extent. False: the disk takes no request.
  bool begin(DiskIo& io, int fd, uint64_t offset);
  // Whether the completion belongs to the trial; then it goes on.
  bool complete(DiskIo& io, const DiskCompletion& done);
  State state() const { return state_; }
  // It took too long.
  void reject() { state_ = State::kBad; }
  void reset() { state_ = State::kIdle; }

 private:
  bool submit(DiskIo& io, DiskOp op);

  State state_ = State::kIdle;
  int fd_ = -1;
  uint64_t offset_ = 0;
  uint64_t id_ = 0;
  uint64_t number_ = 0;  // another at each trial
  DiskFile::Page page_;
};

}  // namespace kv
