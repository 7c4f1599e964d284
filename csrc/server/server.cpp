// The life of a server, and its loop.
#include "server/server.h"

#include <cmath>
#include <fstream>

#include "base/quiet_thread.h"
#include "base/random.h"
#include "net/listener.h"

namespace kv {
namespace {

constexpr auto kMinSweepInterval = std::chrono::milliseconds(5);
constexpr auto kMaxSweepInterval = std::chrono::milliseconds(1000);

std::string read_boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

}  // namespace

int Server::start() {
  if (running_) return EALREADY;
  if (const int error = open()) {
    stop();
    return error;
  }
  stopping_ = false;
  running_ = true;
  thread_ = quiet_thread([this] { loop(); });
  return 0;
}

std::unique_lock<std::mutex> Server::enter() {
  const std::scoped_lock waiting(entering_);
  return std::unique_lock(mutex_);
}

int Server::open() {
  const uint64_t granule = options_.granule_bytes;
  if (!std::has_single_bit(granule) || granule < 4096 || granule > 65536) return EINVAL;
  if (options_.pool_bytes == 0 || options_.pool_bytes > (uint64_t{1} << 46)) return EINVAL;
  const uint64_t pool_bytes = (options_.pool_bytes + granule - 1) / granule * granule;
  pool_ = std::make_unique<Pool>();
  if (const int error = pool_->open(pool_bytes, options_.prefault, granule, options_.placement))
    return error;
  directory_ = std::make_unique<Pool>("kvstore-directory");
  if (const int error = directory_->open(directory_bytes(pool_bytes), false)) return error;
  if (const int error = poller_.open()) return error;
  // drained_ is opened now: a node that has run out of descriptors can still be drained.
  for (EventFd* event : {&wake_, &drained_})
    if (const int error = event->open()) return error;
  if (const int error = poller_.add(wake_.get(), Poller::kWake, EPOLLIN)) return error;
  uint16_t port = options_.port;
  File tcp, unix;
  if (const int error = listen_tcp(options_.host, port, tcp)) return error;
  if (!options_.unix_path.empty())
    if (const int error = listen_unix(options_.unix_path, options_.unix_mode, unix)) return error;
  port_ = port;
  epoch_ = random_id();
  const TenantLimits limits =
      options_.limits.value_or(TenantLimits::of(options_.tenants.size(), options_.max_connections));
  const auto lock = enter();
  node_ = std::make_unique<Node>(
      NodeOptions{options_.granule_bytes, options_.node, options_.unix_path, read_boot_id(), epoch_,
                  options_.eviction, Tenants(options_.tenants), limits, pool_->pages(),
                  pool_->page_bytes(), pool_->regions(), options_.lend_bytes,
                  options_.reserve_bytes, options_.reserve_timeout_s, options_.digests,
                  options_.max_connections},
      pool_->data(), pool_->size(), pool_->readable_fd(), pool_->writable_fd(), directory_.get());
  connections_ =
      std::make_unique<Connections>(options_, *node_, poller_, std::move(tcp), std::move(unix));
  if (const int error = connections_->start()) return error;
  return open_disk();
}

int Server::open_disk() {
  failed_path_.clear();
  disk_ready_ = disk_busy_ = false;
  if (options_.disk.folder.empty()) return 0;
  if (const int error = notice_.open()) return error;
  if (const int error = node_->open_disk(options_.disk)) {
    failed_path_ = options_.disk.folder;
    return error;
  }
  const DiskTier& disk = *node_->disk();
  for (const int fd : {disk.io_fd(), disk.journal_fd()})
    if (const int error = poller_.add(fd, Poller::kDisk, EPOLLIN)) return error;
  return 0;
}

void Server::stop() {
  if (thread_.joinable()) {
    stopping_ = true;
    wake();
    thread_.join();
  }
  {
    const auto lock = enter();
    connections_.reset();
    poller_.close();
    for (EventFd* event : {&wake_, &drained_, &notice_}) event->close();
    node_.reset();
  }
  flushed_.notify_all();
  pool_.reset();
  directory_.reset();
  running_ = false;
}

Server::Placed Server::placed() const {
  if (pool_ == nullptr) return {};
  return {pool_->pages(), pool_->page_bytes(), pool_->huge_error(), pool_->numa_error(),
          pool_->regions().size()};
}

int Server::timeout_ms() const {
  if (connections_->has_queued() || disk_busy_ || node_->replies().has_dirty() ||
      !node_->is_clear())
    return 0;
  TimePoint until = next_sweep_;
  if (const auto deadline = node_->next_deadline()) until = std::min(until, *deadline);
  const std::chrono::duration<double, std::milli> left = until - Clock::now();
  return static_cast<int>(std::clamp(std::ceil(left.count()), 0.0, 60'000.0));
}

void Server::loop() {
  std::unique_lock<std::mutex> lock = enter();
  next_sweep_ = Clock::now();
  while (!stopping_) {
    const int timeout = timeout_ms();
    lock.unlock();
    const int count = poller_.wait(timeout);
    lock = enter();
    node_->set_now(Clock::now());
    poller_.each(count, [this](auto... event) { on_event(event...); });
    connections_->resume_queued();
    node_->begin_turn();
    node_->clear_up();
    if (node_->disk() != nullptr) turn_disk();
    node_->expire_waits();
    node_->expire_tier_asks();
    if (node_->now() >= next_sweep_) sweep();
    if (node_->draining()) node_->end_hopeless_waits();
    connections_->flush_dirty();
    if (node_->draining()) connections_->end_idle();
    if (node_->draining() && node_->sessions().empty()) drained_.signal();
  }
}

void Server::on_event(Poller::Kind kind, uint64_t id, uint32_t events) {
  switch (kind) {
    case Poller::kWake: return wake_.clear();
    case Poller::kListenTcp: return connections_->accept_all(false);
    case Poller::kListenUnix: return connections_->accept_all(true);
    case Poller::kDisk: disk_ready_ = true; return;
    // Its write end has been closed. Lifting the fence closes its descriptor.
    case Poller::kFence: return node_->fences().lift(id);
    case Poller::kSession: return connections_->serve(id, events);
  }
}

void Server::turn_disk() {
  DiskTier& disk = *node_->disk();
  if (std::exchange(disk_ready_, false)) disk.poll();
  node_->expire_runs();
  disk_busy_ = disk.pump();
  if (disk.has_notices()) notice_.signal();
  flushed_.notify_all();
}

void Server::sweep() {
  node_->read_notes();
  node_->expire_reservations();
  connections_->end_stalled();
  connections_->trim();
  connections_->accept_again();
  const auto quarter = std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(options_.frame_deadline_s) / 4);
  next_sweep_ =
      node_->now() + std::clamp<Clock::duration>(quarter, kMinSweepInterval, kMaxSweepInterval);
}

}  // namespace kv
