// Mapping a pool's memory with regard to the size of its pages and to NUMA nodes: system calls, and
// nothing of the store.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kv {

// Maps `bytes` of `fd` shared, at an address that is a multiple of `alignment` (a power of two; 0:
// any). The kernel maps a huge page as one only where address and file offset agree. MAP_FAILED with
// errno.
void* map_shared(int fd, size_t bytes, int protection, size_t alignment);

// The size of the pages of a file of hugetlbfs; 0 for any other file.
size_t hugetlb_page_bytes(int fd);

// Touches all of a shared mapping, for writing. Pages that are there stay. 0 or an errno.
int populate(void* data, size_t bytes, bool writable);

// Makes transparent huge pages of a mapping that begins at a multiple of `page_bytes`, also where the
// host would not by itself. 0, or an errno where some of it stays in small ones.
int collapse(uint8_t* data, size_t bytes, size_t page_bytes);

// Lets new pages come from `numa_node`, and from others when it has none left. 0 or an errno.
int prefer_numa_node(uint8_t* data, size_t bytes, uint32_t numa_node);
// Ends that: pages come from wherever they are touched.
void forget_numa_node(uint8_t* data, size_t bytes);

// The node of the CPU that this runs on; -1 where the kernel does not say.
int current_numa_node();

}  // namespace kv
