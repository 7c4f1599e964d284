#include "disk/trial.h"

#include <cstring>

#include "disk/file.h"

namespace kv {
namespace {

constexpr uint64_t kTrialIds = uint64_t{3} << 61;
constexpr size_t kPage = DiskFile::kAlignment;

}  // namespace

bool DiskTrial::begin(DiskIo& io, int fd, uint64_t offset) {
  if (!page_) page_ = DiskFile::make_page();
  if (!page_) return false;
  fd_ = fd, offset_ = offset;
  ++number_;
  std::memset(page_.get(), 0, kPage);
  std::memcpy(page_.get(), &number_, sizeof number_);
  if (!submit(io, DiskOp::kWrite)) return false;
  state_ = State::kWriting;
  return true;
}

bool DiskTrial::submit(DiskIo& io, DiskOp op) {
  if (id_ == 0) id_ = kTrialIds;
  return io.submit({++id_, op, fd_, offset_, page_.get(), kPage});
}

bool DiskTrial::complete(DiskIo& io, const DiskCompletion& done) {
  if (state_ == State::kIdle || state_ >= State::kWell || done.id != id_) return false;
  if (done.error != 0) {
    state_ = State::kBad;
  } else if (state_ == State::kWriting) {
    state_ = submit(io, DiskOp::kSync) ? State::kSyncing : State::kBad;
  } else if (state_ == State::kSyncing) {
    std::memset(page_.get(), 0, kPage);
    state_ = submit(io, DiskOp::kRead) ? State::kReading : State::kBad;
  } else {
    const bool same = std::memcmp(page_.get(), &number_, sizeof number_) == 0;
    state_ = same ? State::kWell : State::kBad;
  }
  return true;
}

}  // namespace kv
