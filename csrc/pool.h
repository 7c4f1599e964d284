// The server's memory: a sealed memfd that clients may map.
#pragma once

#include <cstddef>
#include <cstdint>

#include "file.h"

namespace kv {

class Pool {
 public:
  // Makes and maps `bytes` of memory, touching all of it with `prefault`. 0 or an errno.
  int open(size_t bytes, bool prefault);
  Pool() = default;
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  // To be passed to clients: cannot be grown, shrunk or sealed otherwise; the second cannot be
  // mapped for writing.
  int writable_fd() const { return writable_.get(); }
  int readable_fd() const { return readable_.get(); }

 private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
  File writable_;
  File readable_;
};

}  // namespace kv
