// Blocks of a pool on this host, found in its directory and copied without asking the server.
#pragma once

#include <cstddef>
#include <cstdint>
#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "memory/directory.h"
#include "memory/notes.h"
#include "memory/pool_mapping.h"
#include "memory/segments.h"

namespace kv {

// What the node calls the blocks of one manifest.
struct BlockNames {
  uint32_t spec_id = 0;
  std::vector<uint32_t> part_ids;  // in the manifest's order
};

class LocalLease;

// Answers yes only: what it does not find, or what changes under it, is for the server to say. One
// thread at a time.
class LocalReader : public std::enable_shared_from_this<LocalReader> {
 public:
  // Maps both files (not owned, not needed afterwards). Null and an errno if they cannot be mapped.
  static std::shared_ptr<LocalReader> map(int directory_fd, size_t directory_bytes, int notes_fd,
                                          int& error);

  // Whether the pool has all of these blocks with all parts. If so, they count as used.
  bool has_all(const BlockNames& names, HashSpan hashes);

  struct Request {
    const BlockNames& names;
    size_t part;  // < names.part_ids.size()
    HashSpan hashes;
    const std::vector<size_t>& indices;  // as many as hashes, within the segments
    bool verify;
  };
  // Copies one part of the leading blocks that the pool has with all parts; returns how many came
  // whole, with `verify` also checked against their digests. What lies in the memory of the first
  // block behind them is anything.
  size_t read(const PoolMapping& pool, const Segments& to, const Request& request);

  // Whether this part is there. If so, it counts as used, but not as asked for.
  bool keep(const PartKey& key);
  // What the client tells the node (memory/notes.h).
  uint8_t* notes() const { return notes_memory_->data(); }

  // Pins these blocks where they lie, one part of them or (no `part`) all. Null if not all of them
  // are found with all parts, or there are no pins left. They count as used.
  std::unique_ptr<LocalLease> acquire(const BlockNames& names, std::optional<size_t> part,
                                      HashSpan hashes);

 private:
  LocalReader(std::shared_ptr<PoolMapping> directory, std::shared_ptr<PoolMapping> notes);

  using Place = DirectoryView::Place;
  void prefetch(const BlockNames& names, HashSpan hashes) const;
  void prefetch_one(const BlockNames& names, const Hash& hash) const;
  // Where the part at `part` lies, if all parts are there.
  std::optional<Place> find_complete(const BlockNames& names, const Hash& hash, size_t part) const;

  std::shared_ptr<PoolMapping> directory_memory_, notes_memory_;
  DirectoryView directory_;
  UseLog log_;

  friend class LocalLease;
  PinBoard pins_;
};

// Parts of blocks that stay where they are while this lives, or until release(). Safe in threads.
class LocalLease {
 public:
  LocalLease(std::shared_ptr<LocalReader> reader, size_t blocks);
  ~LocalLease() { release(); }
  LocalLease(const LocalLease&) = delete;
  LocalLease& operator=(const LocalLease&) = delete;

  // False if the part is not there any more, or there is no pin left.
  bool add(const PartKey& key);
  void release();

  // Of each part of each block, block by block.
  const std::vector<uint64_t>& offsets() const { return offsets_; }
  const std::vector<uint32_t>& crcs() const { return crcs_; }

 private:
  std::shared_ptr<LocalReader> reader_;
  friend class LocalReader;
  int64_t blocks_;
  std::vector<size_t> pins_, entries_;
  std::vector<uint64_t> offsets_;
  std::vector<uint32_t> crcs_;
  std::atomic<bool> held_{true};
};

}  // namespace kv
