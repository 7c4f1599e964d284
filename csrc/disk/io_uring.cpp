// DiskIo on io_uring, by raw system calls: the wheel must neither contain nor require liburing, and
// the part of the interface in use is small.
#include "base/clock.h"
#include "disk/io.h"

#if __has_include(<linux/io_uring.h>)

#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <bit>

#include "base/event_fd.h"

namespace kv {
namespace {

// How often a request is repeated that the kernel could not take just now.
constexpr uint8_t kMaxRetries = 16;

int setup(unsigned entries, io_uring_params& params) {
  return static_cast<int>(syscall(__NR_io_uring_setup, entries, &params));
}

int enter(int ring, unsigned submit, unsigned wait) {
  const unsigned flags = wait != 0 ? IORING_ENTER_GETEVENTS : 0;
  return static_cast<int>(
      syscall(__NR_io_uring_enter, ring, submit, wait, flags, nullptr, size_t{0}));
}

int register_eventfd(int ring, int fd) {
  return static_cast<int>(syscall(__NR_io_uring_register, ring, IORING_REGISTER_EVENTFD, &fd, 1u));
}

// A part of the ring, shared with the kernel.
class SharedMap {
 public:
  SharedMap() = default;
  SharedMap(const SharedMap&) = delete;
  SharedMap& operator=(const SharedMap&) = delete;
  ~SharedMap() {
    if (data_ != nullptr) munmap(data_, bytes_);
  }

  int open(int ring, uint64_t where, size_t bytes) {
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring,
                      static_cast<off_t>(where));
    if (data == MAP_FAILED) return errno;
    data_ = static_cast<uint8_t*>(data);
    bytes_ = bytes;
    return 0;
  }

  template <class T> T* at(size_t offset) const { return reinterpret_cast<T*>(data_ + offset); }

 private:
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
};

class DiskIoUring final : public DiskIo {
 public:
  int open(size_t depth) {
    depth_ = depth;
    io_uring_params params{};
    ring_.reset(setup(std::bit_ceil(static_cast<unsigned>(depth)), params));
    if (!ring_) return errno;
    if (const int error = wake_.open()) return error;
    if (const int error = map(params)) return error;
    if (register_eventfd(ring_.get(), wake_.get()) != 0) return errno;
    slots_.resize(depth);
    for (uint32_t i = 0; i < depth; ++i) free_.push_back(i);
    return 0;
  }

  // After closing the ring alone the kernel would still write to memory that may be freed.
  ~DiskIoUring() override {
    uint32_t head = cq_head_ == nullptr ? 0 : *cq_head_;
    while (in_kernel_ != 0) {
      if (enter(ring_.get(), 0, 1) < 0 && errno != EINTR) break;
      const uint32_t tail = std::atomic_ref(*cq_tail_).load(std::memory_order_acquire);
      in_kernel_ -= tail - head;
      head = tail;
      std::atomic_ref(*cq_head_).store(head, std::memory_order_release);
    }
  }

  int completion_fd() const override { return wake_.get(); }
  size_t in_flight() const override { return depth_ - free_.size() + failed_.size(); }
  std::string_view kind() const override { return "io_uring"; }

  bool submit(const DiskRequest& request) override {
    if (free_.empty()) return false;
    const uint32_t slot = free_.back();
    free_.pop_back();
    slots_[slot] = {request, Clock::now(), 0, {}, 0};
    queue(slot);
    return true;
  }

  void flush() override {
    while (!queued_.empty()) {
      const int taken = enter(ring_.get(), static_cast<unsigned>(queued_.size()), 0);
      if (taken < 0 && errno == EINTR) continue;
      // EAGAIN, EBUSY: the kernel lacks memory just now. take() tries again if a completion is
      // still to come; else the requests fail, so that no caller waits for ever.
      if (taken <= 0) return in_kernel_ != 0 ? void() : fail_queued(taken < 0 ? errno : EIO);
      queued_.erase(queued_.begin(), queued_.begin() + taken);
      in_kernel_ += static_cast<uint32_t>(taken);
    }
  }

  void take(std::vector<DiskCompletion>& done) override {
    // Before the ring is read: later completions signal again.
    wake_.clear();
    done.insert(done.end(), failed_.begin(), failed_.end());
    failed_.clear();
    // Pairs with the kernel's release store of the tail.
    const uint32_t tail = std::atomic_ref(*cq_tail_).load(std::memory_order_acquire);
    uint32_t head = *cq_head_;  // only this thread writes it
    for (; head != tail; ++head) {
      const io_uring_cqe& entry = cqes_[head & cq_mask_];
      --in_kernel_;
      on_result(static_cast<uint32_t>(entry.user_data), entry.res, done);
    }
    std::atomic_ref(*cq_head_).store(head, std::memory_order_release);
    flush();
  }

 private:
  struct Slot {
    DiskRequest request;
    Clock::time_point since;
    uint64_t moved;  // bytes
    iovec span;      // READV and WRITEV: kernels before 5.6 know no READ and WRITE
    uint8_t retries;
  };

  int map(const io_uring_params& params) {
    const auto& sq = params.sq_off;
    const auto& cq = params.cq_off;
    if (const int error = sq_.open(ring_.get(), IORING_OFF_SQ_RING,
                                   sq.array + params.sq_entries * sizeof(uint32_t)))
      return error;
    if (const int error = cq_.open(ring_.get(), IORING_OFF_CQ_RING,
                                   cq.cqes + params.cq_entries * sizeof(io_uring_cqe)))
      return error;
    if (const int error =
            sqes_.open(ring_.get(), IORING_OFF_SQES, params.sq_entries * sizeof(io_uring_sqe)))
      return error;
    sq_tail_ = sq_.at<uint32_t>(sq.tail);
    sq_mask_ = *sq_.at<uint32_t>(sq.ring_mask);
    sq_array_ = sq_.at<uint32_t>(sq.array);
    cq_head_ = cq_.at<uint32_t>(cq.head);
    cq_tail_ = cq_.at<uint32_t>(cq.tail);
    cq_mask_ = *cq_.at<uint32_t>(cq.ring_mask);
    cqes_ = cq_.at<io_uring_cqe>(cq.cqes);
    return 0;
  }

  // There is always room: the ring has an entry for each slot.
  void queue(uint32_t slot) {
    Slot& own = slots_[slot];
    const DiskRequest& request = own.request;
    const uint32_t tail = *sq_tail_;  // only this thread writes it
    io_uring_sqe& entry = sqes_.at<io_uring_sqe>(0)[tail & sq_mask_];
    entry = {};
    entry.fd = request.fd;
    entry.user_data = slot;
    if (request.op == DiskOp::kSync) {
      entry.opcode = IORING_OP_FSYNC;
      entry.fsync_flags = IORING_FSYNC_DATASYNC;
    } else {
      own.span = {request.data + own.moved, request.bytes - own.moved};
      entry.opcode = request.op == DiskOp::kRead ? IORING_OP_READV : IORING_OP_WRITEV;
      entry.off = request.offset + own.moved;
      entry.addr = reinterpret_cast<uintptr_t>(&own.span);
      entry.len = 1;
    }
    sq_array_[tail & sq_mask_] = tail & sq_mask_;
    std::atomic_ref(*sq_tail_).store(tail + 1, std::memory_order_release);
    queued_.push_back(slot);
  }

  void on_result(uint32_t slot, int32_t result, std::vector<DiskCompletion>& done) {
    Slot& own = slots_[slot];
    if (result == -EINTR || (result == -EAGAIN && own.retries++ < kMaxRetries)) return queue(slot);
    if (result < 0) return complete(slot, -result, done);
    if (own.request.op == DiskOp::kSync) return complete(slot, 0, done);
    own.moved += static_cast<uint32_t>(result);
    if (own.moved == own.request.bytes) return complete(slot, 0, done);
    if (result == 0) return complete(slot, EIO, done);
    queue(slot);
  }

  void complete(uint32_t slot, int error, std::vector<DiskCompletion>& done) {
    const std::chrono::nanoseconds spent = Clock::now() - slots_[slot].since;
    done.push_back({slots_[slot].request.id, error, static_cast<uint64_t>(spent.count())});
    free_.push_back(slot);
  }

  // The kernel has not read the queued requests: they are taken back.
  void fail_queued(int error) {
    const auto count = static_cast<uint32_t>(queued_.size());
    std::atomic_ref(*sq_tail_).store(*sq_tail_ - count, std::memory_order_release);
    for (const uint32_t slot : queued_) complete(slot, error, failed_);
    queued_.clear();
    wake_.signal();
  }

  size_t depth_ = 0;
  File ring_;
  EventFd wake_;
  SharedMap sq_, cq_, sqes_;
  uint32_t* sq_tail_ = nullptr;
  uint32_t* sq_array_ = nullptr;
  uint32_t* cq_head_ = nullptr;
  uint32_t* cq_tail_ = nullptr;
  io_uring_cqe* cqes_ = nullptr;
  uint32_t sq_mask_ = 0;
  uint32_t cq_mask_ = 0;

  std::vector<Slot> slots_;  // never grows: the kernel reads the spans
  std::vector<uint32_t> free_;
  std::vector<uint32_t> queued_;  // in the ring, not yet the kernel's
  uint32_t in_kernel_ = 0;
  std::vector<DiskCompletion> failed_;
};

}  // namespace

std::unique_ptr<DiskIo> make_disk_io_uring(size_t depth, int& error) {
  auto made = std::make_unique<DiskIoUring>();
  error = made->open(depth);
  return error == 0 ? std::move(made) : nullptr;
}

}  // namespace kv

#else  // built where the kernel's headers are older than io_uring

namespace kv {

std::unique_ptr<DiskIo> make_disk_io_uring(size_t, int& error) {
  error = ENOSYS;
  return nullptr;
}

}  // namespace kv

#endif
