// The memory between which bindings copy: the caller's, and a mapped pool.
#pragma once

#include "bindings/store/module.h"
#include "memory/pool_mapping.h"
#include "memory/segments.h"

namespace kv::python {

using Indices = std::vector<size_t>;

// Segments, with the buffer if they were made over one.
struct OwnedSegments {
  Segments segments;
  std::shared_ptr<Buffer> owner;  // dropped with the GIL held, as Python objects are
};

// A mapping that can be closed. Each copy and each slice shares its ownership.
class PoolView {
 public:
  PoolView(int fd, size_t size, bool writable, std::optional<int> fence_fd, bool prefault,
           size_t page_bytes) {
    int error = 0;
    {
      const ReleaseGil released(prefault);
      mapping_ =
          PoolMapping::map(fd, size, writable, fence_fd.value_or(-1), prefault, error, page_bytes);
    }
    if (!mapping_) throw_errno(error);
  }
  void close() { mapping_.reset(); }
  std::shared_ptr<PoolMapping> share() const {
    if (!mapping_) throw nb::value_error("the pool view is closed");
    return mapping_;
  }

 private:
  std::shared_ptr<PoolMapping> mapping_;
};

inline void check_indices(const Segments& segments, const Indices& indices) {
  if (!segments.blocks) return;
  for (const size_t index : indices)
    if (index >= *segments.blocks) throw nb::index_error("a block index outside the segments");
}

inline void check_destination(const Segments& segments) {
  if (!segments.writable) throw nb::value_error("the segments are not writable");
}

}  // namespace kv::python
