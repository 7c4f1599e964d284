#include "pool_mapping.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

namespace kv {

std::shared_ptr<PoolMapping> PoolMapping::map(int fd, size_t size, bool writable, int fence_fd,
                                              bool prefault, int& error) {
  struct stat info{};
  const int protection = PROT_READ | (writable ? PROT_WRITE : 0);
  void* data = MAP_FAILED;
  if (fstat(fd, &info) == 0) {
    // A file shorter than the mapping would be a SIGBUS in the middle of a copy.
    if (size == 0 || static_cast<uint64_t>(info.st_size) < size) errno = EINVAL;
    else data = mmap(nullptr, size, protection, MAP_SHARED, fd, 0);
  }
  if (data == MAP_FAILED) {
    error = errno;
    if (fence_fd >= 0) close(fence_fd);
    return nullptr;
  }
  // A forked child must not keep a way to write slots after its parent has died.
  madvise(data, size, MADV_DONTFORK);
  if (prefault) {
#ifdef MADV_POPULATE_READ
    madvise(data, size, writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ);  // best effort
#endif
  }
  error = 0;
  return std::shared_ptr<PoolMapping>(
      new PoolMapping(static_cast<uint8_t*>(data), size, writable, fence_fd));
}

PoolMapping::PoolMapping(uint8_t* data, size_t size, bool writable, int fence_fd)
    : data_(data), size_(size), writable_(writable), fence_fd_(fence_fd), owner_(getpid()) {}

bool PoolMapping::inherited() const { return getpid() != owner_; }

PoolMapping::~PoolMapping() {
  if (!inherited()) munmap(data_, size_);
  if (fence_fd_ >= 0) close(fence_fd_);
}

}  // namespace kv
