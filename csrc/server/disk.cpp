// The server's loop and the disk: when it is looked at, and who waits for it.
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <cerrno>

#include "server/server.h"

namespace kv {

int Server::open_disk() {
  failed_path_.clear();
  disk_ready_ = disk_busy_ = false;
  if (options_.disk.folder.empty()) return 0;
  notice_.reset(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!notice_) return errno;
  if (const int error = node_->open_disk(options_.disk)) {
    failed_path_ = options_.disk.folder;
    return error;
  }
  DiskTier& disk = *node_->disk();
  if (const int error = watch(disk.io_fd(), kDisk, 0, EPOLLIN)) return error;
  return watch(disk.journal_fd(), kDisk, 0, EPOLLIN);
}

void Server::turn_disk() {
  if (std::exchange(disk_ready_, false)) node_->disk()->poll();
  node_->expire_runs();
  disk_busy_ = node_->disk()->pump();
  if (node_->disk()->has_notices()) signal(notice_);
  flushed_.notify_all();
}

FlushResult Server::flush_disk(double timeout_s) {
  const auto until = std::chrono::steady_clock::now() +
                     std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                         std::chrono::duration<double>(timeout_s));
  auto lock = enter();
  if (node_ == nullptr || node_->disk() == nullptr) return {false, "there is no disk", 0, 0};
  const Node* const node = node_.get();
  node_->read_notes();
  const DiskTier::FlushMark mark = node_->disk()->begin_flush();
  wake();
  FlushResult result;
  while (true) {
    // It may have been stopped meanwhile, and started again.
    if (node_.get() != node) return {false, "the node leaves", 0, 0};
    DiskTier& disk = *node_->disk();
    result.durable_blocks = disk.durable_blocks();
    result.skipped = disk.skipped();
    if (!disk.usable()) result.why = std::string("the disk is bypassed: ") + disk.fault_name();
    else if (disk.flushed(mark)) result.done = true;
    if (result.done || !result.why.empty()) return result;
    if (flushed_.wait_until(lock, until) == std::cv_status::timeout) {
      result.why = "the deadline passed";
      return result;
    }
  }
}

std::vector<DiskNotice> Server::take_notices() {
  const auto lock = enter();
  if (node_ == nullptr || node_->disk() == nullptr) return {};
  uint64_t count;
  [[maybe_unused]] const ssize_t got = read(notice_.get(), &count, sizeof count);
  return node_->disk()->take_notices();
}

}  // namespace kv
