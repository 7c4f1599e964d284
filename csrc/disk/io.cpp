#include "disk/io.h"

#include <cerrno>

namespace kv {
namespace {

constexpr size_t kMaxDepth = 4096;

struct Kind {
  std::string_view name;
  std::unique_ptr<DiskIo> (*make)(size_t depth, int& error);
};
constexpr Kind kKinds[] = {{"io_uring", make_disk_io_uring}, {"threads", make_disk_io_threads}};

}  // namespace

const std::vector<std::string_view>& disk_io_kinds() {
  static const std::vector<std::string_view> names = [] {
    std::vector<std::string_view> all;
    for (const Kind& kind : kKinds) all.push_back(kind.name);
    return all;
  }();
  return names;
}

std::unique_ptr<DiskIo> make_disk_io(std::string_view kind, size_t depth, int& error) {
  error = EINVAL;
  if (depth == 0 || depth > kMaxDepth) return nullptr;
  for (const Kind& each : kKinds) {
    if (kind != each.name && kind != "auto") continue;
    error = 0;
    auto made = each.make(depth, error);
    if (made || kind != "auto") return made;
  }
  return nullptr;
}

}  // namespace kv
