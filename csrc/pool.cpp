#include "pool.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <string>

namespace kv {

int Pool::open(size_t bytes, bool prefault) {
  writable_.reset(memfd_create("kvstore-pool", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!writable_) return errno;
  const int fd = writable_.get();
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) return errno;
  // A shrunken file would be a SIGBUS for everybody who copies.
  if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) return errno;
  // A reader cannot open it anew for writing through /proc (unless it is root).
  if (fchmod(fd, S_IRUSR) != 0) return errno;
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  readable_.reset(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!readable_) return errno;
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return errno;
  data_ = static_cast<uint8_t*>(data);
  size_ = bytes;
  madvise(data, bytes, MADV_DONTFORK);
  madvise(data, bytes, MADV_HUGEPAGE);  // where the host allows it for shared memory
#ifdef MADV_POPULATE_WRITE
  if (prefault && madvise(data, bytes, MADV_POPULATE_WRITE) != 0 && errno != EINVAL) return errno;
#endif
  return 0;
}

Pool::~Pool() {
  if (data_ != nullptr) munmap(data_, size_);
}

}  // namespace kv
