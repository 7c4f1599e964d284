#include "base/memory_map.h"

#include <linux/magic.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <vector>

namespace kv {
namespace {

#ifndef MADV_COLLAPSE
constexpr int MADV_COLLAPSE = 25;  // Linux 6.1
#endif

size_t rounded_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

void* map_shared(int fd, size_t bytes, int protection, size_t alignment) {
  if (alignment == 0) return mmap(nullptr, bytes, protection, MAP_SHARED, fd, 0);
  // Reserve enough for the mapping at the first aligned address; unmap the rest.
  const size_t room = rounded_up(bytes, static_cast<size_t>(sysconf(_SC_PAGESIZE))) + alignment;
  void* reserved =
      mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return MAP_FAILED;
  auto* begin = static_cast<uint8_t*>(reserved);
  const size_t head = rounded_up(reinterpret_cast<uintptr_t>(begin), alignment) -
                      reinterpret_cast<uintptr_t>(begin);
  void* data = mmap(begin + head, bytes, protection, MAP_SHARED | MAP_FIXED, fd, 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    munmap(reserved, room);
    errno = error;
    return MAP_FAILED;
  }
  const size_t tail = alignment - head;
  if (head != 0) munmap(begin, head);
  if (tail != 0) munmap(begin + (room - tail), tail);
  return data;
}

size_t hugetlb_page_bytes(int fd) {
  struct statfs info {};
  if (fstatfs(fd, &info) != 0) return 0;
  const bool huge = static_cast<unsigned long>(info.f_type) == HUGETLBFS_MAGIC;
  return huge ? static_cast<size_t>(info.f_bsize) : 0;
}

int populate(void* data, size_t bytes, bool writable) {
#ifdef MADV_POPULATE_WRITE
  if (madvise(data, bytes, writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ) != 0) return errno;
#endif
  return 0;
}

int collapse(uint8_t* data, size_t bytes, size_t page_bytes) {
  const size_t whole = bytes / page_bytes * page_bytes;
  if (whole == 0) return EINVAL;
  // The kernel collapses where a page exists, and fills in the rest: one page in each place is ten
  // times faster than to touch all of them first.
  for (size_t at = 0; at < whole; at += page_bytes)
    if (const int error = populate(data + at, 1, true)) return error;
  return madvise(data, whole, MADV_COLLAPSE) == 0 ? 0 : errno;
}

// Preferred, not bound: with MPOL_BIND, a NUMA node without free memory means the OOM killer, and
// with hugetlbfs SIGBUS in the process that copies; a page on another node is only slower.
int prefer_numa_node(uint8_t* data, size_t bytes, uint32_t numa_node) {
  constexpr size_t kBits = 8 * sizeof(unsigned long);
  std::vector<unsigned long> nodes(numa_node / kBits + 1, 0);
  nodes[numa_node / kBits] |= 1ul << (numa_node % kBits);
  // The kernel uses one bit less than the given number.
  const long done =
      syscall(SYS_mbind, data, bytes, MPOL_PREFERRED, nodes.data(), nodes.size() * kBits + 1, 0u);
  return done == 0 ? 0 : errno;
}

void forget_numa_node(uint8_t* data, size_t bytes) {
  syscall(SYS_mbind, data, bytes, MPOL_DEFAULT, nullptr, 0ul, 0u);
}

int current_numa_node() {
  unsigned cpu = 0, node = 0;
  if (syscall(SYS_getcpu, &cpu, &node, nullptr) != 0) return -1;
  return static_cast<int>(node);
}

}  // namespace kv
