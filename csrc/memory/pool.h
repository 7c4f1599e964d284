// The server's memory: a sealed memfd that clients may map, of the kind of pages that is wanted.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "base/file.h"

namespace kv {

// Pages of a pool: the system's own; huge ones that the kernel assembles (THP); huge ones that the
// host has reserved (hugetlbfs).
enum class Pages : uint8_t { kSmall, kTransparent, kExplicit };
inline constexpr std::array<const char*, 3> kPagesNames{"small", "transparent", "explicit"};

// What is wanted. A size of 0: not those pages.
struct Placement {
  size_t explicit_page_bytes = 0;      // tried first
  bool explicit_only = false;          // no other pages
  size_t transparent_page_bytes = 0;   // tried next
  bool transparent_by_touch = true;    // the kernel gives those at the first touch; else only a
                                       // prefaulted pool can get them, by MADV_COLLAPSE
  std::vector<uint32_t> numa_nodes{};  // one region of the pool for each; empty: not bound
};

// A part of the pool whose memory belongs to a NUMA node.
struct PoolRegion {
  uint32_t numa_node = 0;
  uint64_t begin = 0;  // in the pool, bytes
  uint64_t bytes = 0;
};

// Divides `bytes` evenly; regions begin at multiples of `alignment`. Empty without nodes, or if the
// pool is too small to be divided.
std::vector<PoolRegion> divide_pool(uint64_t bytes, uint64_t alignment,
                                    const std::vector<uint32_t>& numa_nodes);

class Pool {
 public:
  // Makes and maps at least `bytes` of memory, in whole pages of the first wanted kind that the
  // host has. `prefault`: touches all of it. `granule_bytes`: regions begin at multiples. 0 or an
  // errno; ENOMEM if explicit_only and the host has too few such pages.
  int open(size_t bytes, bool prefault, size_t granule_bytes = 4096, const Placement& wanted = {});
  // The kernel lists the memory under `name`.
  explicit Pool(const char* name = "kvstore-pool") : name_(name) {}
  ~Pool() { close(); }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  // For clients: neither can be grown, shrunk or unsealed; the second cannot be mapped for writing.
  int writable_fd() const { return writable_.get(); }
  int readable_fd() const { return readable_.get(); }
  // The caller's from here on; only the mapping stays.
  File take_writable_file() { return readable_.reset(), std::move(writable_); }

  Pages pages() const { return pages_; }
  size_t page_bytes() const { return page_bytes_; }
  // Empty if no NUMA node was wanted or the pool could not be bound; numa_error() is the reason.
  const std::vector<PoolRegion>& regions() const { return regions_; }
  int numa_error() const { return numa_error_; }
  // Why some or all of it is not in the wanted pages; 0: it is, or may still be.
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
