// The file that holds the bytes of an SSD tier: opened, locked, sized, and with an identity.
#pragma once

#include <cstdint>
#include <string>

#include "base/file.h"

namespace kv {

// A header of kDataOffset bytes, then `data_bytes` of extents. Blocking: for start-up.
//
// The header carries a random id, made anew whenever the file is made or gets another size: what an
// index says of a data file holds only for the one with that id.
class DiskFile {
 public:
  // Offsets, lengths and memory of I/O under O_DIRECT are multiples of this.
  static constexpr uint64_t kAlignment = 4096;
  // Extent offsets count from here, in the file.
  static constexpr uint64_t kDataOffset = 65536;

  // Opens `path` or makes it (mode 0600) and takes the lock on it, which lasts as long as the object.
  // 0 or an errno: EBUSY where another node has it, ENOSPC where the disk has no room for all of it,
  // EINVAL for `data_bytes` that is 0 or not a multiple of kAlignment, EMEDIUMTYPE for a file that
  // is there and is none of ours (it is left alone).
  int open(const std::string& path, uint64_t data_bytes);

  int fd() const { return file_.get(); }
  uint64_t id() const { return id_; }
  uint64_t data_bytes() const { return data_bytes_; }
  // What the file system refused, for the node to say so: without O_DIRECT every byte goes through
  // the page cache; without room set aside a full disk is found out by a write.
  bool direct() const { return direct_; }
  bool allocated() const { return allocated_; }
  // The file was there already, with this size: what was written to it is still there.
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

// Has the names in the directory of `path` survive a crash of the machine. 0 or an errno.
int sync_directory_of(const std::string& path);

}  // namespace kv
