// Whether this is still the process that made something, or one that was forked since.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

namespace kv {

// A page that is zero in a child: to ask the kernel for the process takes a twentieth of a small copy.
// Where it has no such pages, it is asked.
class ForkMark {
 public:
  ForkMark() {
    const long bytes = sysconf(_SC_PAGESIZE);
    bytes_ = bytes > 0 ? static_cast<size_t>(bytes) : 4096;
    void* const page =
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) return;
    if (madvise(page, bytes_, MADV_WIPEONFORK) != 0) {
      munmap(page, bytes_);
      return;
    }
    page_ = static_cast<volatile uint8_t*>(page);
    *page_ = 1;
  }
  ~ForkMark() {
    if (page_ != nullptr) munmap(const_cast<uint8_t*>(page_), bytes_);
  }
  ForkMark(const ForkMark&) = delete;
  ForkMark& operator=(const ForkMark&) = delete;

  // Whether this is still the process that made it.
  bool here() const { return page_ != nullptr ? *page_ != 0 : getpid() == pid_; }

 private:
  pid_t pid_ = getpid();
  size_t bytes_ = 0;
  volatile uint8_t* page_ = nullptr;
};

}  // namespace kv
