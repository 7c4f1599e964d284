// A client's mapping of a server's pool, and the fence that tells the server when it is gone.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace kv {

// Unmaps the pool, and only then closes the fence (wire/wire.h, SHARED MEMORY). Shared by whoever copies
// or reads, so that it ends when the last of them is done.
class PoolMapping {
 public:
  // Maps `size` bytes of `fd` (not owned, not needed afterwards). Owns `fence_fd` (-1: none) from
  // here on, also on failure. `page_bytes`: what the server says that the pool's pages have, 0 if it
  // says nothing; whatever it says, the mapping is right, and with huge ones it is faster. Null and
  // an errno in `error` if it cannot be mapped.
  static std::shared_ptr<PoolMapping> map(int fd, size_t size, bool writable, int fence_fd,
                                          bool prefault, int& error, size_t page_bytes = 0);
  ~PoolMapping();
  PoolMapping(const PoolMapping&) = delete;
  PoolMapping& operator=(const PoolMapping&) = delete;

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  bool writable() const { return writable_; }
  // Whether this is a forked child, in which there is no such memory.
  bool inherited() const;
  bool holds(uint64_t offset, uint64_t bytes) const {
    return offset <= size_ && bytes <= size_ - offset;
  }

 private:
  PoolMapping(uint8_t* data, size_t size, size_t mapped, bool writable, int fence_fd);

  uint8_t* data_;
  size_t size_;
  size_t mapped_;  // bytes, whole pages
  bool writable_;
  int fence_fd_;
  pid_t owner_;  // the mapping is not inherited: a forked child has something else there
};

}  // namespace kv
