// Asynchronous reads and writes of a disk: the interface, and its implementations by name.
#pragma once

#include <array>
#include <memory>
#include <string_view>
#include <vector>

namespace kv {

enum class DiskOp : uint8_t {
  kRead,
  kWrite,
  kSync,  // fdatasync: covers the writes whose completions were taken before it was submitted
};

struct DiskRequest {
  uint64_t id = 0;  // chosen by the caller; the completion has it
  DiskOp op = DiskOp::kRead;
  int fd = -1;  // stays open until the completion
  uint64_t offset = 0;
  // Read or written without a copy; stays allocated until the completion. With O_DIRECT it,
  // `offset` and `bytes` are multiples of DiskFile::kAlignment.
  uint8_t* data = nullptr;
  uint64_t bytes = 0;
};

struct DiskCompletion {
  uint64_t id = 0;
  int error = 0;    // 0: all bytes; else an errno. A read that meets the end of the file is EIO.
  uint64_t ns = 0;  // from submit() until the completion was seen
};

// Used by one thread, such as an epoll loop. Only the destructor waits for the disk. Requests
// complete in any order. A short transfer is continued inside.
class DiskIo {
 public:
  // Drops requests that have not begun and waits for the others, whose memory the kernel uses.
  // Completions that were not taken are lost.
  virtual ~DiskIo() = default;

  // Readable while there are completions to take (EPOLLIN, level-triggered). Owned by this object.
  virtual int completion_fd() const = 0;
  // Accepts a request, which may begin only with the next flush(). False: `depth` requests are in
  // flight; try again after a completion.
  virtual bool submit(const DiskRequest& request) = 0;
  // Begins all submitted requests: once for a batch.
  virtual void flush() = 0;
  virtual void take(std::vector<DiskCompletion>& done) = 0;
  // Requests that were submitted and whose completions were not taken.
  virtual size_t in_flight() const = 0;
  // Which of kDiskIoKinds it is.
  virtual std::string_view kind() const = 0;
};

// "io_uring", "threads": the faster first.
inline constexpr std::array<std::string_view, 2> kDiskIoKinds{"io_uring", "threads"};
// For at most `depth` requests in flight, 1..4096. `kind` "auto": the first kind that works here
// (containers often refuse io_uring). Null with an errno in `error`: EINVAL for an unknown name or
// depth, else the reason why this kind does not work.
std::unique_ptr<DiskIo> make_disk_io(std::string_view kind, size_t depth, int& error);
// ENOSYS, EPERM and ENOMEM: this host has no io_uring for us.
std::unique_ptr<DiskIo> make_disk_io_uring(size_t depth, int& error);
std::unique_ptr<DiskIo> make_disk_io_threads(size_t depth, int& error);

}  // namespace kv
