// A log of the blocks that a client on this host has used without a request.
#pragma once

#include <atomic>

namespace kv {

// A ring in memory that one client writes and the server reads now and then. Records that are not
// read in time are overwritten: they serve eviction and statistics, and some may be lost. Whatever
// a client writes, it can only name entries of the directory.
class UseLog {
 public:
  static constexpr size_t kRecords = 4096;
  static constexpr size_t kBytes = 64 + kRecords * sizeof(uint64_t);

  explicit UseLog(void* memory) : head_(static_cast<std::atomic<uint64_t>*>(memory)) {}

  enum class Kind : uint64_t {
    kMatched,
    kRead,  // its bytes
    kKept,  // a put found it there
  };
  struct Use {
    uint64_t index = 0;  // of an entry of the directory
    Kind kind = Kind::kMatched;
  };

  // CLIENT, one thread at a time.
  void add(Use use) {
    const uint64_t head = head_->load(std::memory_order_relaxed);
    const uint64_t packed = (use.index << kKindBits) | static_cast<uint64_t>(use.kind);
    record(head).store(packed, std::memory_order_relaxed);
    head_->store(head + 1, std::memory_order_release);
  }

  // SERVER. Visits the uses since the last call, the oldest first.
  template <class Visit> void drain(Visit visit) {
    const uint64_t head = head_->load(std::memory_order_acquire);
    if (head == seen_) return;
    // A client can write any number.
    if (head - seen_ > kRecords) seen_ = head - kRecords;
    for (; seen_ != head; ++seen_) {
      const uint64_t use = record(seen_).load(std::memory_order_relaxed);
      visit(Use{use >> kKindBits, static_cast<Kind>(use & ((1u << kKindBits) - 1))});
    }
  }

 private:
  static constexpr int kKindBits = 2;

  std::atomic<uint64_t>& record(uint64_t i) { return head_[8 + i % kRecords]; }

  std::atomic<uint64_t>* head_;
  uint64_t seen_ = 0;
};

}  // namespace kv
