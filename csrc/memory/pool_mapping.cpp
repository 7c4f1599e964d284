#include "memory/pool_mapping.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cerrno>

#include "base/memory_map.h"

namespace kv {
namespace {

constexpr size_t kMostPageBytes = size_t{1} << 30;

// The alignment that keeps transparent huge pages of this size whole; 0 for small or invalid sizes.
size_t huge_alignment(size_t page_bytes) {
  const bool huge = page_bytes > static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return huge && page_bytes <= kMostPageBytes && std::has_single_bit(page_bytes) ? page_bytes : 0;
}

}  // namespace

std::shared_ptr<PoolMapping> PoolMapping::map(int fd, size_t size, bool writable, int fence_fd,
                                              bool prefault, int& error, size_t page_bytes) {
  struct stat info {};
  const int protection = PROT_READ | (writable ? PROT_WRITE : 0);
  // hugetlbfs aligns by itself, and unmaps whole pages only.
  const size_t hugetlb = hugetlb_page_bytes(fd);
  const size_t alignment = hugetlb != 0 ? 0 : huge_alignment(page_bytes);
  const size_t mapped = hugetlb != 0 ? (size + hugetlb - 1) / hugetlb * hugetlb : size;
  void* data = MAP_FAILED;
  if (fstat(fd, &info) == 0) {
    // A file shorter than the mapping would cause SIGBUS during a copy.
    if (size == 0 || static_cast<uint64_t>(info.st_size) < size) errno = EINVAL;
    else data = map_shared(fd, mapped, protection, alignment);
  }
  if (data == MAP_FAILED) {
    error = errno;
    if (fence_fd >= 0) close(fence_fd);
    return nullptr;
  }
  // A forked child must not be able to write slots after its parent has died.
  madvise(data, mapped, MADV_DONTFORK);
  // The first process that touches a page determines its kind, and that may be this client.
  if (alignment != 0) madvise(data, mapped, MADV_HUGEPAGE);
  else if (hugetlb == 0 && page_bytes != 0) madvise(data, mapped, MADV_NOHUGEPAGE);
  if (prefault) populate(data, mapped, writable);  // best effort
  error = 0;
  return std::shared_ptr<PoolMapping>(
      new PoolMapping(static_cast<uint8_t*>(data), size, mapped, writable, fence_fd));
}

PoolMapping::PoolMapping(uint8_t* data, size_t size, size_t mapped, bool writable, int fence_fd)
    : data_(data), size_(size), mapped_(mapped), writable_(writable), fence_fd_(fence_fd),
      owner_(getpid()) {}

bool PoolMapping::inherited() const { return getpid() != owner_; }

PoolMapping::~PoolMapping() {
  if (!inherited()) munmap(data_, mapped_);
  if (fence_fd_ >= 0) close(fence_fd_);
}

}  // namespace kv
