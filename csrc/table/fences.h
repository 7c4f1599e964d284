// Slots that stay out of use: the client of an ended connection may still be writing them.
#pragma once

#include "base/file.h"
#include "table/client_holds.h"
#include "table/table.h"

namespace kv {

// A fence is the read end of a pipe; the client closes the write end after it has unmapped the pool
// (wire/wire.h, SHARED MEMORY). The owner polls the descriptors for a hang-up.
class Fences {
 public:
  Fences(Table& table, ClientHolds& holds) : table_(table), holds_(holds) {}

  // Keeps the slots out of use, and counted as the client's, until lift() of the returned id.
  uint64_t raise(File fence, std::vector<Slot> slots, uint64_t client) {
    slots_ += slots.size();
    for (const Slot& slot : slots) bytes_ += slot.bytes;
    fences_.emplace(++last_id_, Fence{std::move(fence), std::move(slots), client});
    return last_id_;
  }
  int descriptor(uint64_t id) const {
    const auto found = fences_.find(id);
    return found == fences_.end() ? -1 : found->second.file.get();
  }
  // The client is gone: frees its slots.
  void lift(uint64_t id) {
    const auto found = fences_.find(id);
    if (found == fences_.end()) return;
    for (const Slot& slot : found->second.slots) {
      bytes_ -= slot.bytes;
      holds_.gave(found->second.client, slot.bytes);
      table_.release(slot);
    }
    slots_ -= found->second.slots.size();
    fences_.erase(found);
  }
  uint64_t slots() const { return slots_; }
  uint64_t bytes() const { return bytes_; }

 private:
  struct Fence {
    File file;
    std::vector<Slot> slots;
    uint64_t client;
  };
  Table& table_;
  ClientHolds& holds_;
  uint64_t last_id_ = 0;
  uint64_t slots_ = 0, bytes_ = 0;
  std::unordered_map<uint64_t, Fence> fences_;
};

}  // namespace kv
