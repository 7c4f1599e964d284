// System calls that map a pool's memory with regard to page sizes and NUMA nodes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kv {

// Maps `bytes` of `fd` shared, at a multiple of `alignment` (a power of two; 0: anywhere). The
// kernel maps a huge page as one only if address and file offset agree. MAP_FAILED with errno.
void* map_shared(int fd, size_t bytes, int protection, size_t alignment);

// The size of the pages of a file of hugetlbfs; 0 for any other file.
size_t hugetlb_page_bytes(int fd);

// Touches all pages of a shared mapping. Existing pages stay. 0 or an errno.
int populate(void* data, size_t bytes, bool writable);

// Makes transparent huge pages of a mapping that begins at a multiple of `page_bytes`, also if the
// kernel would not by itself. 0, or an errno if some of it stays in small pages.
int collapse(uint8_t* data, size_t bytes, size_t page_bytes);

// New pages come from `numa_node`, or from others when it has none left. 0 or an errno.
int prefer_numa_node(uint8_t* data, size_t bytes, uint32_t numa_node);
// Ends that: pages come from the node that touches them.
void forget_numa_node(uint8_t* data, size_t bytes);

// The NUMA node of the current CPU; -1 if unknown.
int current_numa_node();

}  // namespace kv
