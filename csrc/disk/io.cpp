#include "disk/io.h"

#include <cerrno>

namespace kv {
namespace {

constexpr size_t kMaxDepth = 4096;
constexpr auto kMakers = std::array{make_disk_io_uring, make_disk_io_threads};
static_assert(kMakers.size() == kDiskIoKinds.size());

}  // namespace

std::unique_ptr<DiskIo> make_disk_io(std::string_view kind, size_t depth, int& error) {
  error = EINVAL;
  if (depth == 0 || depth > kMaxDepth) return nullptr;
  for (size_t i = 0; i < kMakers.size(); ++i) {
    if (kind != kDiskIoKinds[i] && kind != "auto") continue;
    error = 0;
    auto made = kMakers[i](depth, error);
    if (made || kind != "auto") return made;
  }
  return nullptr;
}

}  // namespace kv
