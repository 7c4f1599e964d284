// A client's mapping of a server's pool, and the fence that ends with it.
#pragma once

#include <sys/types.h>

#include <memory>

namespace kv {

// Unmaps the pool, and only then closes the fence (wire/wire.h, SHARED MEMORY). Shared by all
// copies and reads in progress: it ends with the last of them.
class PoolMapping {
 public:
  // Maps `size` bytes of `fd` (not owned, not needed afterwards). Owns `fence_fd` (-1: none), also
  // on failure. `page_bytes`: the size of the pool's pages according to the server, 0 if unknown; a
  // wrong one only makes the mapping slower. Null with an errno in `error` on failure.
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
  pid_t owner_;  // a forked child does not inherit the mapping
};

}  // namespace kv
