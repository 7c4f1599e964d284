// The memory in which a client on this host reports to its node; each connection has its own.
#pragma once

#include <optional>

#include "memory/put_ring.h"

namespace kv {

// The blocks that a client has used without a request: a ring that the client writes and the server
// reads now and then. Records that are not read in time are overwritten: they serve eviction and
// statistics, and some may be lost. Whatever a client writes, it can only name entries of the
// directory.
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

// The slots that a client reads in place, which it pins without a request: hazard pointers, by the
// slot's offset. The client pins a slot, then checks that its part is still in the directory. The
// server takes a part out of the directory, then checks whether its slot is pinned. Both checks
// follow a full fence, so that one of the two sees the other. A client can do no more harm than to
// keep slots. Thread-safe.
class PinBoard {
 public:
  static constexpr size_t kPins = 512;
  static constexpr size_t kBytes = 64 + kPins * sizeof(uint64_t);

  explicit PinBoard(void* memory) : words_(static_cast<std::atomic<uint64_t>*>(memory)) {}

  // CLIENT. Returns the index of the pin; nothing if all are in use.
  std::optional<size_t> pin(uint64_t offset) {
    words_[kInUse].fetch_add(1);
    for (size_t i = 0; i < kPins; ++i) {
      uint64_t free = 0;
      if (!slot(i).compare_exchange_strong(free, offset + 1)) continue;
      std::atomic_thread_fence(std::memory_order_seq_cst);
      return i;
    }
    words_[kInUse].fetch_sub(1);
    return std::nullopt;
  }
  void unpin(size_t index) {
    slot(index).store(0, std::memory_order_release);
    words_[kInUse].fetch_sub(1);
  }
  // The number of leases, and of blocks under them, for statistics.
  void count(int64_t leases, int64_t blocks) {
    words_[kLeases].fetch_add(static_cast<uint64_t>(leases), std::memory_order_relaxed);
    words_[kBlocks].fetch_add(static_cast<uint64_t>(blocks), std::memory_order_relaxed);
  }

  // SERVER.
  bool in_use() const { return words_[kInUse].load() != 0; }
  bool pins(uint64_t offset) const {
    for (size_t i = 0; i < kPins; ++i)
      if (words_[kHead + i].load() == offset + 1) return true;
    return false;
  }
  uint64_t leases() const { return counted(kLeases); }
  uint64_t blocks() const { return counted(kBlocks); }

 private:
  enum Word : size_t { kInUse = 0, kLeases = 1, kBlocks = 2, kHead = 8 };

  std::atomic<uint64_t>& slot(size_t i) { return words_[kHead + i]; }
  uint64_t counted(Word word) const {
    return in_use() ? std::min<uint64_t>(words_[word].load(std::memory_order_relaxed), kPins) : 0;
  }

  std::atomic<uint64_t>* words_;
};

struct NotesLayout {
  static constexpr size_t kUses = 0;
  static constexpr size_t kPins = kUses + UseLog::kBytes;
  static constexpr size_t kPuts = kPins + PinBoard::kBytes;
  static constexpr size_t kBytes = kPuts + PutRing::kBytes;
};
static_assert(NotesLayout::kPins % 64 == 0 && NotesLayout::kPuts % 64 == 0);

}  // namespace kv
