// The server's memory: a sealed memfd that clients may map.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/file.h"
#include "memory/placement.h"

namespace kv {

class Pool {
 public:
  // Makes and maps at least `bytes` of memory, whole pages of those that `wanted` names first and
  // the host has, touching all of it with `prefault`. `granule_bytes`: where regions may begin. 0 or
  // an errno; ENOMEM where only explicit pages would do and the host has too few.
  int open(size_t bytes, bool prefault, size_t granule_bytes = 4096, const Placement& wanted = {});
  // `name`: under which the kernel lists the memory.
  explicit Pool(const char* name = "kvstore-pool") : name_(name) {}
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  // To be passed to clients: cannot be grown, shrunk or sealed otherwise; the second cannot be
  // mapped for writing.
  int writable_fd() const { return writable_.get(); }
  int readable_fd() const { return readable_.get(); }
  // Only the mapping is needed from here on.
  void close_files() { writable_.reset(), readable_.reset(); }

  Pages pages() const { return pages_; }
  size_t page_bytes() const { return page_bytes_; }
  // Empty where no NUMA node was wanted, or the pool could not be bound, with the reason.
  const std::vector<PoolRegion>& regions() const { return regions_; }
  int numa_error() const { return numa_error_; }
  // Why some of it, or all, is not in the pages that were wanted; 0 where it is, or may yet be.
  int huge_error() const { return huge_error_; }

 private:
  int make(size_t bytes, unsigned flags, size_t alignment);
  int open_explicit(size_t bytes, bool prefault, const Placement& wanted);
  int open_other(size_t bytes, bool prefault, size_t granule_bytes, const Placement& wanted);
  void bind(size_t alignment, const std::vector<uint32_t>& numa_nodes);
  void close();

  const char* name_;
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
  Pages pages_ = Pages::kSmall;
  size_t page_bytes_ = 0;
  std::vector<PoolRegion> regions_;
  int numa_error_ = 0;
  int huge_error_ = 0;
  File writable_;
  File readable_;
};

}  // namespace kv
