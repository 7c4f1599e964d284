// DiskIo without io_uring: a few threads with blocking calls.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>

#include "base/clock.h"
#include "base/event_fd.h"
#include "base/quiet_thread.h"
#include "disk/io.h"

namespace kv {
namespace {

// Enough to keep a disk busy.
constexpr size_t kMaxThreads = 8;

ssize_t transfer(const DiskRequest& request, uint64_t done) {
  uint8_t* const data = request.data + done;
  const auto offset = static_cast<off_t>(request.offset + done);
  if (request.op == DiskOp::kRead) return pread(request.fd, data, request.bytes - done, offset);
  return pwrite(request.fd, data, request.bytes - done, offset);
}

int perform(const DiskRequest& request) {
  if (request.op == DiskOp::kSync) return fdatasync(request.fd) == 0 ? 0 : errno;
  for (uint64_t done = 0; done < request.bytes;) {
    const ssize_t moved = transfer(request, done);
    if (moved == 0) return EIO;
    if (moved > 0) done += static_cast<uint64_t>(moved);
    else if (errno != EINTR) return errno;
  }
  return 0;
}

class DiskIoThreads final : public DiskIo {
 public:
  DiskIoThreads(size_t depth, EventFd wake) : depth_(depth), wake_(std::move(wake)) {
    for (size_t i = 0; i < std::min(depth, kMaxThreads); ++i)
      threads_.push_back(quiet_thread([this] { work(); }));
  }

  ~DiskIoThreads() override {
    {
      const std::scoped_lock lock(mutex_);
      stopping_ = true;
      begun_.clear();
    }
    ready_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  int completion_fd() const override { return wake_.get(); }
  size_t in_flight() const override { return in_flight_; }
  std::string_view kind() const override { return "threads"; }

  bool submit(const DiskRequest& request) override {
    if (in_flight_ == depth_) return false;
    ++in_flight_;
    submitted_.push_back({request, Clock::now()});
    return true;
  }

  void flush() override {
    if (submitted_.empty()) return;
    const size_t count = submitted_.size();
    {
      const std::scoped_lock lock(mutex_);
      begun_.insert(begun_.end(), submitted_.begin(), submitted_.end());
    }
    submitted_.clear();
    count == 1 ? ready_.notify_one() : ready_.notify_all();
  }

  void take(std::vector<DiskCompletion>& done) override {
    const std::scoped_lock lock(mutex_);
    if (done_.empty()) return;
    // Under the lock, so that the signal and the completions agree.
    wake_.clear();
    in_flight_ -= done_.size();
    done.insert(done.end(), done_.begin(), done_.end());
    done_.clear();
  }

 private:
  struct Task {
    DiskRequest request;
    Clock::time_point since;
  };

  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      ready_.wait(lock, [this] { return stopping_ || !begun_.empty(); });
      if (stopping_) return;
      const Task task = begun_.front();
      begun_.pop_front();
      lock.unlock();
      const int error = perform(task.request);
      const std::chrono::nanoseconds spent = Clock::now() - task.since;
      lock.lock();
      done_.push_back({task.request.id, error, static_cast<uint64_t>(spent.count())});
      if (done_.size() == 1) wake_.signal();
    }
  }

  const size_t depth_;
  const EventFd wake_;
  // Of the owner.
  std::vector<Task> submitted_;
  size_t in_flight_ = 0;
  // Shared, under the mutex.
  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<Task> begun_;
  std::vector<DiskCompletion> done_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<DiskIo> make_disk_io_threads(size_t depth, int& error) {
  EventFd wake;
  error = wake.open();
  return error == 0 ? std::make_unique<DiskIoThreads>(depth, std::move(wake)) : nullptr;
}

}  // namespace kv
