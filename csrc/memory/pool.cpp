#include "memory/pool.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <string>

#include "base/memory_map.h"

namespace kv {

std::vector<PoolRegion> divide_pool(uint64_t bytes, uint64_t alignment,
                                    const std::vector<uint32_t>& numa_nodes) {
  std::vector<PoolRegion> regions;
  const uint64_t units = bytes / alignment, count = numa_nodes.size();
  if (count == 0 || units < count) return regions;
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t begin = units * i / count * alignment;
    const uint64_t end = i + 1 == count ? bytes : units * (i + 1) / count * alignment;
    regions.push_back({numa_nodes[i], begin, end - begin});
  }
  return regions;
}

int Pool::open(size_t bytes, bool prefault, size_t granule_bytes, const Placement& wanted) {
  if (wanted.explicit_page_bytes != 0) {
    const int error = open_explicit(bytes, prefault, wanted);
    if (error == 0 || wanted.explicit_only) return error;
    close();
    huge_error_ = error;
  } else if (wanted.explicit_only) {
    return ENOMEM;
  }
  return open_other(bytes, prefault, granule_bytes, wanted);
}

// The mapping reserves the pages: a client that touches one later will find it.
int Pool::open_explicit(size_t bytes, bool prefault, const Placement& wanted) {
  const size_t page = wanted.explicit_page_bytes;
  const auto shift = static_cast<unsigned>(std::countr_zero(page));
  const size_t whole = (bytes + page - 1) / page * page;
  if (const int error = make(whole, MFD_HUGETLB | (shift << MFD_HUGE_SHIFT), 0)) return error;
  pages_ = Pages::kExplicit;
  page_bytes_ = page;
  bind(page, wanted.numa_nodes);
  return prefault ? populate(data_, size_, true) : 0;
}

int Pool::open_other(size_t bytes, bool prefault, size_t granule_bytes, const Placement& wanted) {
  const size_t huge = wanted.transparent_page_bytes;
  if (const int error = make(bytes, 0, huge)) return error;
  page_bytes_ = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  bind(std::max({granule_bytes, page_bytes_, huge}), wanted.numa_nodes);
  madvise(data_, size_, huge == 0 ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
  const int refused = huge != 0 && prefault ? collapse(data_, size_, huge) : 0;
  // EINVAL: the kernel does not support it, or it is off. Any other error: not everywhere.
  const bool asked = prefault && refused != EINVAL;
  if (huge != 0 && (wanted.transparent_by_touch || asked))
    pages_ = Pages::kTransparent, page_bytes_ = huge;
  if (refused != 0 && !(refused == EINVAL && wanted.transparent_by_touch)) huge_error_ = refused;
  const int error = prefault ? populate(data_, size_, true) : 0;
  return error == EINVAL ? 0 : error;  // a kernel that cannot populate
}

int Pool::make(size_t bytes, unsigned flags, size_t alignment) {
  writable_.reset(memfd_create(name_, MFD_CLOEXEC | MFD_ALLOW_SEALING | flags));
  if (!writable_) return errno;
  const int fd = writable_.get();
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) return errno;
  // A client that copies would get SIGBUS if the file shrank.
  if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) return errno;
  // A reader cannot re-open it for writing through /proc (unless it is root).
  if (fchmod(fd, S_IRUSR) != 0) return errno;
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  readable_.reset(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!readable_) return errno;
  void* data = map_shared(fd, bytes, PROT_READ | PROT_WRITE, alignment);
  if (data == MAP_FAILED) return errno;
  data_ = static_cast<uint8_t*>(data);
  size_ = bytes;
  madvise(data, bytes, MADV_DONTFORK);
  return 0;
}

void Pool::bind(size_t alignment, const std::vector<uint32_t>& numa_nodes) {
  regions_ = divide_pool(size_, alignment, numa_nodes);
  numa_error_ = 0;
  for (const PoolRegion& region : regions_) {
    numa_error_ = prefer_numa_node(data_ + region.begin, region.bytes, region.numa_node);
    if (numa_error_ == 0) continue;
    forget_numa_node(data_, size_);
    return regions_.clear();
  }
}

void Pool::close() {
  if (data_ != nullptr) munmap(data_, size_);
  data_ = nullptr;
  size_ = page_bytes_ = 0;
  pages_ = Pages::kSmall;
  regions_.clear();
  writable_.reset();
  readable_.reset();
}

}  // namespace kv
