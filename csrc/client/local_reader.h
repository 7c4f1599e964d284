// Blocks of a pool on this host, found in its directory and copied without a request.
#pragma once

#include "memory/directory.h"
#include "memory/notes.h"
#include "memory/pool_mapping.h"
#include "memory/segments.h"

namespace kv {

// The ids of one manifest in the node.
struct BlockNames {
  uint32_t spec_id = 0;
  std::vector<uint32_t> part_ids;  // in the manifest's order
};

class LocalLease;

// It only confirms: for a block that it does not find, or that changes meanwhile, the server has to
// be asked. One thread at a time.
class LocalReader : public std::enable_shared_from_this<LocalReader> {
 public:
  // Maps both files (not owned, not needed afterwards). Null and an errno if they cannot be mapped.
  static std::shared_ptr<LocalReader> map(int directory_fd, size_t directory_bytes, int notes_fd,
                                          int& error);

  // Whether the pool has all these blocks with all parts. If so, they count as used.
  bool has_all(const BlockNames& names, HashSpan hashes);

  struct Request {
    const BlockNames& names;
    size_t part;  // < names.part_ids.size()
    HashSpan hashes;
    const std::vector<size_t>& indices;  // as many as hashes, within the segments
    bool verify;
  };
  // Copies one part of the leading blocks that the pool has with all parts; returns how many, with
  // `verify` of those that agree with their digests. The memory of the next block is undefined.
  size_t read(const PoolMapping& pool, const Segments& to, const Request& request);

  // Where one part of each of these blocks is now. Empty unless the pool has all of them.
  std::vector<DirectoryView::Place> find_all(const BlockNames& names, size_t part,
                                             HashSpan hashes) const;
  // Whether all are still there: bytes that were read since find_all() are theirs.
  bool stand(const std::vector<DirectoryView::Place>& places) const;

  // Whether the pool has this part. If so, it counts as used, but not as a hit.
  bool keep(const PartKey& key);
  uint8_t* notes() const { return notes_memory_->data(); }

  // Pins one part (without `part`: all parts) of these blocks. Null if not all of them are found
  // with all parts, or no pins are left. They count as used.
  std::unique_ptr<LocalLease> acquire(const BlockNames& names, std::optional<size_t> part,
                                      HashSpan hashes);

 private:
  LocalReader(std::shared_ptr<PoolMapping> directory, std::shared_ptr<PoolMapping> notes);

  using Place = DirectoryView::Place;
  void prefetch(const BlockNames& names, HashSpan hashes) const;
  void prefetch_one(const BlockNames& names, const Hash& hash) const;
  // Where the part with index `part` is, if the pool has all parts.
  std::optional<Place> find_complete(const BlockNames& names, const Hash& hash, size_t part) const;

  std::shared_ptr<PoolMapping> directory_memory_, notes_memory_;
  DirectoryView directory_;
  UseLog log_;

  friend class LocalLease;
  PinBoard pins_;
};

// Parts of blocks that are pinned until release() or the end of this object. Thread-safe.
class LocalLease {
 public:
  LocalLease(std::shared_ptr<LocalReader> reader, size_t blocks);
  ~LocalLease() { release(); }
  LocalLease(const LocalLease&) = delete;
  LocalLease& operator=(const LocalLease&) = delete;

  // False if the part is gone or no pin is left.
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
