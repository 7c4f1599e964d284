// The data file of an SSD tier: opened, locked, sized, and with an identity.
#pragma once

#include <cstdlib>
#include <memory>
#include <string>

#include "base/file.h"

namespace kv {

// A header of kDataOffset bytes, then `data_bytes` of extents. Blocking: for start-up.
//
// The header has a random id, which changes when the file is made or resized: an index is valid
// only for the data file with its id.
class DiskFile {
 public:
  // Offsets, lengths and memory of I/O under O_DIRECT are multiples of this.
  static constexpr uint64_t kAlignment = 4096;
  struct Freed {
    void operator()(void* memory) const { std::free(memory); }
  };
  using Page = std::unique_ptr<uint8_t, Freed>;
  // kAlignment zero bytes; null without memory.
  static Page make_page();
  static constexpr uint64_t aligned(uint64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  // Extent offsets count from here, in the file.
  static constexpr uint64_t kDataOffset = 65536;

  // Opens or makes `path` (mode 0600) and locks it for the life of this object. 0 or an errno:
  // EBUSY if another node has it, ENOSPC if the disk has no room for all of it, EINVAL for
  // `data_bytes` that is 0 or not a multiple of kAlignment, EMEDIUMTYPE for an existing file of
  // another kind (left unchanged).
  int open(const std::string& path, uint64_t data_bytes);

  int fd() const { return file_.get(); }
  uint64_t id() const { return id_; }
  uint64_t data_bytes() const { return data_bytes_; }
  // Whether the file system supports it: without O_DIRECT every byte goes through the page cache;
  // without reserved room, only a write finds that the disk is full.
  bool direct() const { return direct_; }
  bool allocated() const { return allocated_; }
  // The file existed with this size: its contents are valid.
  bool kept() const { return kept_; }

 private:
  int open_locked(const std::string& path);
  int set_size(uint64_t bytes);
  int read_header(bool& found);
  int write_header();

  File file_;
  uint64_t id_ = 0;
  uint64_t data_bytes_ = 0;
  bool direct_ = false;
  bool allocated_ = false;
  bool kept_ = false;
};

// Makes the names in the directory of `path` durable. 0 or an errno.
int sync_directory_of(const std::string& path);

}  // namespace kv
