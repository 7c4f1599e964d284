// Slots that a client on this host reads in place: it pins them without a request.
#pragma once

#include <algorithm>
#include <atomic>
#include <optional>

namespace kv {

// Hazard pointers, by the slot's offset, in memory that one client writes and the server reads. The
// client pins a slot, then checks that its part is still in the directory. The server takes a part
// out of the directory, then checks whether its slot is pinned. Both checks follow a full fence, so
// that one of the two sees the other. A client can do no more harm than to keep slots. Thread-safe.
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

}  // namespace kv
