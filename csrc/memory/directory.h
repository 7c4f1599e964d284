// Where each committed part is, in memory that clients on the same host map to read it.
#pragma once

#include <atomic>

#include "wire/keys.h"
#include "wire/wire.h"

namespace kv {

// One part of one block. Only the server writes; clients read at any time. So every word is atomic,
// and `version` is a sequence lock: it is odd during a change and has a new value after each.
struct DirectoryEntry {
  std::atomic<uint64_t> version;
  std::atomic<uint64_t> hash[4];
  std::atomic<uint64_t> names;  // spec id, part id; 0 = free
  std::atomic<uint64_t> offset;
  std::atomic<uint64_t> crc;
};
static_assert(sizeof(DirectoryEntry) == 64 && std::atomic<uint64_t>::is_always_lock_free);

// The places where a part may be: kWindow entries from the one that its name gives. If all are
// taken, the part is not in the directory and its readers ask the server. With half of the entries
// taken that befalls hardly any part; with a window of 8 entries, as in 0.1, one in 200: some of
// nearly every prompt of 2,000 blocks.
class DirectoryWindow {
 public:
  static constexpr size_t kWindow = 32;

  // `entries` is a power of two and at least kWindow.
  DirectoryWindow(size_t entries, const PartKey& key);
  size_t operator[](size_t i) const { return (first_ + i) & mask_; }
  bool names(const DirectoryEntry& entry) const;
  void write(DirectoryEntry& entry, uint64_t offset, uint32_t crc) const;

 private:
  uint64_t hash_[4];
  uint64_t names_;
  size_t first_, mask_;
};

// 1/512 of the pool: twice as many entries as it can have parts of 64 KiB. Small pools have 1/128,
// up to 64 MiB: twice as many as they can have parts of 16 KiB.
size_t directory_bytes(uint64_t pool_bytes);

// The server's side.
class Directory {
 public:
  // `memory` is zeroed, `bytes` came from directory_bytes(), both outlive this.
  Directory(void* memory, size_t bytes)
      : entries_(static_cast<DirectoryEntry*>(memory)), count_(bytes / sizeof(DirectoryEntry)) {}

  void publish(const PartKey& key, uint64_t offset, uint32_t crc);
  // Afterwards the slot may be reused: a reader that is copying sees the change when it is done.
  void withdraw(const PartKey& key);
  // The part at `index` (any number), or nothing.
  std::optional<PartKey> at(uint64_t index) const;

 private:
  DirectoryEntry* entries_;
  size_t count_;
};

// A client's side, over memory that it maps for reading.
class DirectoryView {
 public:
  DirectoryView(const void* memory, size_t bytes)
      : entries_(static_cast<const DirectoryEntry*>(memory)),
        count_(bytes / sizeof(DirectoryEntry)) {}

  struct Place {
    size_t index = 0;
    uint64_t version = 0;
    uint64_t offset = 0;
    uint32_t crc = 0;
  };
  std::optional<Place> find(const PartKey& key) const;
  // Whether the part is still at this place: bytes copied from there since find() are its bytes.
  bool stands(const Place& place) const;
  void prefetch(const PartKey& key) const;

 private:
  const DirectoryEntry* entries_;
  size_t count_;
};

}  // namespace kv
