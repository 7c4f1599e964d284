// Leaving without cutting anybody off: what is under way ends, nothing new begins.
#include <unistd.h>

#include "server/server.h"

namespace kv {

int Server::drain() {
  const auto lock = enter();
  if (node_ == nullptr) return -1;
  if (node_->draining()) return drained_.get();
  node_->drain();
  // At once, so that the kernel refuses whoever comes, and another node may have the path. A closed
  // descriptor leaves epoll by itself.
  if (unix_) unlink(options_.unix_path.c_str());
  tcp_.reset();
  unix_.reset();
  wake();
  return drained_.get();
}

bool Server::draining() {
  const auto lock = enter();
  return node_ != nullptr && node_->draining();
}

void Server::end_idle() {
  for (const uint64_t id : node_->idle_sessions()) end(id);
  if (node_->sessions().empty()) signal(drained_);
}

void Server::signal(const File& event) {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(event.get(), &one, sizeof one);
}

}  // namespace kv
