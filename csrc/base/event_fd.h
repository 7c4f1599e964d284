// An eventfd(2) with an owner: one side signals, the other one polls.
#pragma once

#include <sys/eventfd.h>

#include <cerrno>

#include "base/file.h"

namespace kv {

class EventFd {
 public:
  // 0 or an errno.
  int open() {
    file_.reset(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    return file_ ? 0 : errno;
  }
  void close() { file_.reset(); }
  // To be watched for EPOLLIN: readable from signal() to clear(). -1 unless open.
  int get() const { return file_.get(); }
  void signal() const {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(file_.get(), &one, sizeof one);
  }
  void clear() const {
    uint64_t count;
    [[maybe_unused]] const ssize_t got = read(file_.get(), &count, sizeof count);
  }

 private:
  File file_;
};

}  // namespace kv
