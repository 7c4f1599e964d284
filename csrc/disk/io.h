// Reads and writes of a disk that nobody waits for: the seam, and the names of what is behind it.
#pragma once

#include <cstddef>
#include <cstdint>
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
  uint64_t id = 0;  // the caller's; comes back with the completion
  DiskOp op = DiskOp::kRead;
  int fd = -1;  // the caller's; stays open until the completion
  uint64_t offset = 0;
  // The caller's until the completion: read from the disk, or written by it, without a copy. Under
  // O_DIRECT it, `offset` and `bytes` are multiples of DiskFile::kAlignment.
  uint8_t* data = nullptr;
  uint64_t bytes = 0;
};

struct DiskCompletion {
  uint64_t id = 0;
  int error = 0;  // 0: all bytes; else an errno. A read that meets the end of the file is EIO.
  uint64_t ns = 0;  // from submit() until the completion was seen
};

// Owned and driven by one thread, typically an epoll loop. Nothing but the destructor waits for the
// disk.
//
// Requests complete in any order: who needs an order submits the next one when the first has
// completed. A short transfer is continued inside.
class DiskIo {
 public:
  // Drops what has not begun and waits until the kernel has let go of the memory of what has.
  // Completions that were not taken are lost.
  virtual ~DiskIo() = default;

  // Readable while there are completions to take: to be watched for EPOLLIN, level-triggered. The
  // object's own.
  virtual int completion_fd() const = 0;
  // Takes a request on. False, and nothing done: `depth` requests are in flight; try again after a
  // completion. It may begin only with the next flush().
  virtual bool submit(const DiskRequest& request) = 0;
  // Begins all that was submitted: once for a batch of requests.
  virtual void flush() = 0;
  // Appends the completions that there are.
  virtual void take(std::vector<DiskCompletion>& done) = 0;
  // Requests that were submitted and whose completions were not taken.
  virtual size_t in_flight() const = 0;
  // Which of disk_io_kinds() it is.
  virtual std::string_view kind() const = 0;
};

// "io_uring", "threads": the better first.
const std::vector<std::string_view>& disk_io_kinds();
// For at most `depth` requests in flight, 1..4096. `kind` may be "auto": the first of the kinds that
// works here (containers often refuse io_uring). Null with an errno in `error`: EINVAL for an
// unknown name or depth, else why this kind does not work.
std::unique_ptr<DiskIo> make_disk_io(std::string_view kind, size_t depth, int& error);

}  // namespace kv
