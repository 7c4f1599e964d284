// A pool's memory on this very host: pages, alignment, seals, NUMA nodes.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <string>

#include "base/memory_map.h"
#include "check.h"
#include "memory/pool.h"
#include "memory/pool_mapping.h"

namespace {

using namespace kv;

constexpr size_t kMiB = 1u << 20;
constexpr size_t kHuge = 2 * kMiB;

uint64_t allocated(int fd) {
  struct stat info{};
  CHECK(fstat(fd, &info) == 0);
  return static_cast<uint64_t>(info.st_blocks) * 512;
}

bool aligned(const void* data, size_t to) { return reinterpret_cast<uintptr_t>(data) % to == 0; }

void a_pool_of_small_pages_is_sealed_and_not_touched() {
  Pool pool;
  CHECK(pool.open(64 * kMiB, false) == 0);
  CHECK(pool.pages() == Pages::kSmall && pool.page_bytes() == size_t(sysconf(_SC_PAGESIZE)));
  CHECK(pool.size() == 64 * kMiB && allocated(pool.writable_fd()) == 0);
  CHECK(pool.regions().empty() && pool.numa_error() == 0 && pool.huge_error() == 0);
  const int seals = fcntl(pool.writable_fd(), F_GET_SEALS);
  CHECK((seals & F_SEAL_SHRINK) && (seals & F_SEAL_GROW) && (seals & F_SEAL_SEAL));
}

void prefaulting_touches_all_of_it() {
  Pool pool;
  CHECK(pool.open(4 * kMiB, true) == 0);
  CHECK(allocated(pool.writable_fd()) == 4 * kMiB);
}

// Whether the kernel gives them depends on the host; that the pool is whole and right does not.
void transparent_pages_are_made_where_the_kernel_lets_it() {
  Placement wanted;
  wanted.transparent_page_bytes = kHuge;
  wanted.transparent_by_touch = false;
  Pool pool;
  constexpr size_t kOdd = 3 * kHuge + 4096 * 5;
  CHECK(pool.open(kOdd, true, 4096, wanted) == 0);
  CHECK(aligned(pool.data(), kHuge) && pool.size() == kOdd);
  CHECK(allocated(pool.writable_fd()) == kOdd);
  if (pool.pages() == Pages::kTransparent) CHECK(pool.page_bytes() == kHuge);
  else CHECK(pool.huge_error() == EINVAL && pool.page_bytes() < kHuge);
  for (size_t at = 0; at < kOdd; at += 4096) CHECK(pool.data()[at] == 0);
  std::memset(pool.data(), 7, kOdd);
  int error = 0;
  const auto view = PoolMapping::map(pool.readable_fd(), kOdd, false, -1, false, error, kHuge);
  CHECK(view != nullptr && aligned(view->data(), kHuge));
  CHECK(std::memcmp(view->data(), pool.data(), kOdd) == 0);
}

void a_pool_smaller_than_a_huge_page_is_a_pool() {
  Placement wanted;
  wanted.transparent_page_bytes = kHuge;
  Pool pool;
  CHECK(pool.open(4096 * 3, true, 4096, wanted) == 0);
  CHECK(pool.size() == 4096 * 3 && allocated(pool.writable_fd()) == 4096 * 3);
}

// More than any host has set aside.
void pages_that_the_host_does_not_have_are_refused_or_replaced() {
  Placement wanted;
  wanted.explicit_page_bytes = kHuge;
  constexpr size_t kTooMuch = size_t{1} << 39;  // and not more than fits beside ThreadSanitizer
  {
    Pool pool;
    CHECK(pool.open(kTooMuch, false, 4096, wanted) == 0);
    CHECK(pool.pages() == Pages::kSmall && pool.size() == kTooMuch && pool.huge_error() != 0);
  }
  wanted.explicit_only = true;
  Pool pool;
  CHECK(pool.open(kTooMuch, false, 4096, wanted) != 0);
  wanted.explicit_page_bytes = 0;
  Pool none;
  CHECK(none.open(kMiB, false, 4096, wanted) == ENOMEM);
}

void explicit_pages_are_whole_sealed_and_promised_to_clients() {
  Placement wanted;
  wanted.explicit_page_bytes = kHuge;
  wanted.explicit_only = true;
  Pool pool;
  const int refused = pool.open(kHuge + 4096, false, 4096, wanted);
  if (refused != 0) {
    std::printf("skipped: this host has set no huge pages aside (%s)\n", std::strerror(refused));
    return;
  }
  CHECK(pool.pages() == Pages::kExplicit && pool.page_bytes() == kHuge);
  CHECK(pool.size() == 2 * kHuge && allocated(pool.writable_fd()) == 0);
  CHECK(hugetlb_page_bytes(pool.readable_fd()) == kHuge);
  CHECK(ftruncate(pool.writable_fd(), kHuge) != 0);
  CHECK(mmap(nullptr, kHuge, PROT_WRITE, MAP_SHARED, pool.readable_fd(), 0) == MAP_FAILED);
  // A client touches what the server has not: the page was reserved for the file.
  int error = 0;
  auto view = PoolMapping::map(pool.writable_fd(), kHuge + 4096, true, -1, false, error, kHuge);
  CHECK(view != nullptr);
  uint8_t* data = view->data();
  data[kHuge] = 5;
  CHECK(pool.data()[kHuge] == 5);
  view.reset();
  // All of it is unmapped, also what is beyond the bytes that were asked for.
  unsigned char there = 0;
  CHECK(mincore(data + kHuge, 4096, &there) != 0 && errno == ENOMEM);
}

void a_file_of_ordinary_memory_is_no_hugetlbfs() {
  Pool pool;
  CHECK(pool.open(kMiB, false) == 0);
  CHECK(hugetlb_page_bytes(pool.readable_fd()) == 0 && hugetlb_page_bytes(-1) == 0);
}

// What a server says of its pages is advice: nothing breaks if it is nonsense.
void a_mapping_is_right_whatever_the_server_says_of_pages() {
  Pool pool;
  CHECK(pool.open(kMiB, false) == 0);
  pool.data()[kMiB - 1] = 9;
  for (const size_t said : {size_t{0}, size_t{1}, size_t{4096}, size_t{12345}, kHuge, SIZE_MAX}) {
    int error = 0;
    const auto view = PoolMapping::map(pool.readable_fd(), kMiB, false, -1, true, error, said);
    CHECK(view != nullptr && view->data()[kMiB - 1] == 9);
  }
}

void regions_cover_the_pool_and_begin_where_pages_do() {
  for (const uint64_t bytes : {10 * kHuge, 11 * kHuge, 11 * kHuge + 4096}) {
    const auto regions = divide_pool(bytes, kHuge, {0, 2, 5});
    CHECK(regions.size() == 3 && regions[1].numa_node == 2);
    uint64_t at = 0;
    for (const PoolRegion& region : regions) {
      CHECK(region.begin == at && region.begin % kHuge == 0 && region.bytes >= 3 * kHuge);
      at += region.bytes;
    }
    CHECK(at == bytes);
  }
  CHECK(divide_pool(kHuge, kHuge, {0, 1}).empty());
  CHECK(divide_pool(kHuge, 4096, {}).empty());
}

// How often the kernel names this policy for pools of this process.
size_t policies(const std::string& policy) {
  std::ifstream maps("/proc/self/numa_maps");
  size_t found = 0;
  for (std::string line; std::getline(maps, line);)
    if (line.find("kvstore-pool") != std::string::npos && line.find(policy) != std::string::npos)
      ++found;
  return found;
}

void a_pool_prefers_the_nodes_that_it_is_divided_among() {
  Placement wanted;
  wanted.numa_nodes = {0};
  Pool pool;
  CHECK(pool.open(8 * kMiB, true, 65536, wanted) == 0);
  if (pool.numa_error() != 0) {
    std::printf("skipped: mbind: %s\n", std::strerror(pool.numa_error()));
    return;
  }
  CHECK(pool.regions().size() == 1 && pool.regions()[0].bytes == 8 * kMiB);
  CHECK(policies("prefer") == 1 && policies(" N0=") == 1);
  wanted.numa_nodes = {0, 0};
  Pool divided;
  CHECK(divided.open(8 * kMiB, false, 65536, wanted) == 0);
  CHECK(divided.regions().size() == 2 && divided.regions()[1].begin == 4 * kMiB);
}

void a_node_that_there_is_not_leaves_the_pool_unbound() {
  Placement wanted;
  wanted.numa_nodes = {0, 900};
  Pool pool;
  CHECK(pool.open(8 * kMiB, true, 4096, wanted) == 0);
  CHECK(pool.numa_error() != 0 && pool.regions().empty() && policies("prefer") == 0);
}

}  // namespace

int main() {
  a_pool_of_small_pages_is_sealed_and_not_touched();
  prefaulting_touches_all_of_it();
  transparent_pages_are_made_where_the_kernel_lets_it();
  a_pool_smaller_than_a_huge_page_is_a_pool();
  pages_that_the_host_does_not_have_are_refused_or_replaced();
  explicit_pages_are_whole_sealed_and_promised_to_clients();
  a_file_of_ordinary_memory_is_no_hugetlbfs();
  a_mapping_is_right_whatever_the_server_says_of_pages();
  regions_cover_the_pool_and_begin_where_pages_do();
  a_pool_prefers_the_nodes_that_it_is_divided_among();
  a_node_that_there_is_not_leaves_the_pool_unbound();
}
