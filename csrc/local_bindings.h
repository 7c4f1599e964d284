// The directory of a pool on this host, as the bindings that use one see it.
#pragma once

#include <memory>

#include "local_reader.h"
#include "memory_bindings.h"

namespace kv::python {

// A directory that can be given up; whoever reads takes a share of it first.
class DirectoryReader {
 public:
  DirectoryReader(int fd, size_t size, int notes_fd) {
    int error = 0;
    reader_ = LocalReader::map(fd, size, notes_fd, error);
    if (!reader_) throw_errno(error);
  }
  void close() { reader_.reset(); }
  bool closed() const { return reader_ == nullptr; }
  std::shared_ptr<LocalReader> share() const {
    if (!reader_) throw nb::value_error("the directory is closed");
    return reader_;
  }

 private:
  std::shared_ptr<LocalReader> reader_;
};

}  // namespace kv::python
