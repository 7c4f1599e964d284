// What a client on this host reads in place: slots that it has pinned without asking the server.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace kv {

// Words in memory of the server that one client writes and the server reads: hazard pointers, by
// the slot's offset. Who pins looks afterwards whether the part still stands in the directory; the
// server takes a part out of the directory and looks afterwards whether its slot is pinned. One of
// the two sees the other (both looks follow a full fence). What a client writes here can only keep
// slots in use, until it goes. Safe in threads.
class PinBoard {
 public:
  static constexpr size_t kPins = 512;
  static constexpr size_t kBytes = 64 + kPins * sizeof(uint64_t);

  explicit PinBoard(void* memory) : words_(static_cast<std::atomic<uint64_t>*>(memory)) {}

  // By the client. The index of the pin, or nothing if all are in use.
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
  // Leases, and blocks under them, are told for the figures.
  void count(int64_t leases, int64_t blocks) {
    words_[kLeases].fetch_add(static_cast<uint64_t>(leases), std::memory_order_relaxed);
    words_[kBlocks].fetch_add(static_cast<uint64_t>(blocks), std::memory_order_relaxed);
  }

  // By the server.
  bool in_use() const { return words_[kInUse].load() != 0; }
  bool pins(uint64_t offset) const {
    for (size_t i = 0; i < kPins; ++i)
      if (words_[kHead + i].load() == offset + 1) return true;
    return false;
  }
  uint64_t leases() const { return told(kLeases); }
  uint64_t blocks() const { return told(kBlocks); }

 private:
  enum Word : size_t { kInUse = 0, kLeases = 1, kBlocks = 2, kHead = 8 };

  std::atomic<uint64_t>& slot(size_t i) { return words_[kHead + i]; }
  uint64_t told(Word word) const {
    return in_use() ? std::min<uint64_t>(words_[word].load(std::memory_order_relaxed), kPins) : 0;
  }

  std::atomic<uint64_t>* words_;
};

}  // namespace kv
