#include "server/server.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cmath>
#include <fstream>
#include <random>

#include "base/clock.h"
#include "base/tcp_options.h"
#include "net/listener.h"

namespace kv {
namespace {

constexpr auto kMaxSweepInterval = std::chrono::milliseconds(1000);

uint64_t random_epoch() {
  std::random_device random;
  return (uint64_t{random()} << 32) | random() | 1;
}

std::string read_boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

// A peer whose machine is gone is found out within about a minute.
void keep_alive(int fd) {
  const int on = 1, idle_s = 30, interval_s = 10, probes = 3;
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
}

}  // namespace

Server::Server(ServerOptions options) : options_(std::move(options)) {}

Server::~Server() { stop(); }

int Server::start() {
  if (running_) return EALREADY;
  const int error = open();
  if (error != 0) {
    stop();
    return error;
  }
  stopping_ = false;
  running_ = true;
  // Signals are the owner's business: the thread inherits a mask that blocks them all.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { loop(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return 0;
}

std::unique_lock<std::mutex> Server::enter() {
  const std::scoped_lock waiting(door_);
  return std::unique_lock(mutex_);
}

int Server::open() {
  const uint64_t granule = options_.granule_bytes;
  if (!std::has_single_bit(granule) || granule < 4096 || granule > 65536) return EINVAL;
  if (options_.pool_bytes == 0 || options_.pool_bytes > (uint64_t{1} << 46)) return EINVAL;
  const uint64_t pool_bytes = (options_.pool_bytes + granule - 1) / granule * granule;
  pool_ = std::make_unique<Pool>();
  if (const int error = pool_->open(pool_bytes, options_.prefault, granule,
                                      options_.placement)) return error;
  directory_ = std::make_unique<Pool>("kvstore-directory");
  if (const int error = directory_->open(directory_bytes(pool_bytes), false)) return error;
  uint16_t port = options_.port;
  if (const int error = listen_tcp(options_.host, port, tcp_)) return error;
  port_ = port;
  if (!options_.unix_path.empty())
    if (const int error = listen_unix(options_.unix_path, options_.unix_mode, unix_)) return error;
  epoll_.reset(epoll_create1(EPOLL_CLOEXEC));
  wake_.reset(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  // Made now: a node that has run out of descriptors can still be drained.
  drained_.reset(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!epoll_ || !wake_ || !drained_) return errno;
  if (const int error = watch(wake_.get(), kWake, 0, EPOLLIN)) return error;
  if (const int error = watch(tcp_.get(), kListenTcp, 0, EPOLLIN)) return error;
  if (unix_)
    if (const int error = watch(unix_.get(), kListenUnix, 0, EPOLLIN)) return error;
  epoch_ = random_epoch();
  const TenantLimits limits = options_.limits.value_or(
      TenantLimits::of(options_.tenants.size(), options_.max_connections));
  const auto lock = enter();
  node_ =
      std::make_unique<Node>(NodeOptions{options_.granule_bytes, options_.node, options_.unix_path,
                                         read_boot_id(), epoch_, options_.eviction,
                                         Tenants(options_.tenants), limits, pool_->pages(),
                                         pool_->page_bytes(), pool_->regions(), options_.lend_bytes,
                                         options_.reserve_bytes, options_.reserve_timeout_s,
                                         options_.digests},
                             pool_->data(), pool_->size(), pool_->readable_fd(),
                             pool_->writable_fd(), directory_.get());
  return open_disk();
}

void Server::stop() {
  if (thread_.joinable()) {
    stopping_ = true;
    wake();
    thread_.join();
  }
  if (unix_) unlink(options_.unix_path.c_str());
  for (File* file : {&tcp_, &unix_, &epoll_, &wake_, &drained_, &notice_}) file->reset();
  {
    const auto lock = enter();
    node_.reset();
  }
  flushed_.notify_all();
  pool_.reset();
  directory_.reset();
  queued_.clear();
  accept_paused_ = false;
  running_ = false;
}

Server::Placed Server::placed() const {
  if (pool_ == nullptr) return {};
  return {pool_->pages(), pool_->page_bytes(), pool_->huge_error(), pool_->numa_error(),
          pool_->regions().size()};
}

StatList::Values Server::stats() {
  const auto lock = enter();
  if (node_ == nullptr) return {};
  node_->read_notes();
  // Somebody waited for what was posted.
  if (node_->has_dirty() || !node_->is_clear()) wake();
  return node_->stats();
}

uint64_t Server::purge(std::optional<std::string_view> token) {
  auto lock = enter();
  const Node* const node = node_.get();
  if (node == nullptr) return 0;
  const std::optional<uint32_t> tenant =
      token ? node_->admit(*token) : std::optional<uint32_t>();
  if (token && !tenant) return 0;
  Node::Purge purge = node_->begin_purge(tenant);
  // It may be stopped meanwhile, and started again.
  for (bool done = false; !done && node_.get() == node;) {
    node_->begin_turn();
    done = node_->go_on(purge);
    wake();  // what that makes the disk do is done by the loop
    lock.unlock();
    lock = enter();
  }
  return purge.removed();
}

bool Server::admits(std::string_view token) {
  const auto lock = enter();
  return node_ != nullptr && node_->admit(token).has_value();
}

std::optional<size_t> Server::follow_tokens(const std::vector<TenantOptions>& tenants) {
  const auto lock = enter();
  if (node_ == nullptr) return std::nullopt;
  const std::optional<std::vector<uint64_t>> ending = node_->follow_tokens(tenants);
  if (!ending) return std::nullopt;
  for (const uint64_t id : *ending) end(id);
  wake();  // others may have waited for what those held
  return ending->size();
}

bool Server::follow_tls(std::shared_ptr<const TlsContext> tls) {
  const auto lock = enter();
  if (options_.tls == nullptr || tls == nullptr) return false;
  options_.tls = std::move(tls);
  return true;
}

int Server::watch(int fd, Kind kind, uint64_t id, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = (id << kKindBits) | kind;
  return epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0 ? 0 : errno;
}

int Server::timeout_ms() const {
  if (!queued_.empty() || disk_busy_ || node_->has_dirty() || !node_->is_clear()) return 0;
  TimePoint until = next_sweep_;
  if (const auto deadline = node_->next_deadline()) until = std::min(until, *deadline);
  const std::chrono::duration<double, std::milli> left = until - Clock::now();
  return static_cast<int>(std::clamp(std::ceil(left.count()), 0.0, 60'000.0));
}

void Server::loop() {
  std::array<epoll_event, 128> events;
  std::unique_lock<std::mutex> lock = enter();
  next_sweep_ = Clock::now();
  while (!stopping_) {
    const int timeout = timeout_ms();
    lock.unlock();
    const int count = events_.wait(epoll_.get(), events, timeout);
    lock = enter();
    node_->set_now(Clock::now());
    for (int i = 0; i < count; ++i) on_event(events[i].data.u64, events[i].events);
    resume_queued();
    node_->begin_turn();
    node_->clear_up();
    if (node_->disk() != nullptr) turn_disk();
    node_->expire_waits();
    if (node_->now() >= next_sweep_) sweep();
    if (node_->draining()) node_->end_hopeless_waits();
    flush_dirty();
    if (node_->draining()) end_idle();
  }
}

void Server::on_event(uint64_t data, uint32_t events) {
  const uint64_t id = data >> kKindBits;
  switch (static_cast<Kind>(data & ((1u << kKindBits) - 1))) {
    case kWake: return;
    case kListenTcp: return accept_all(tcp_, false);
    case kListenUnix: return accept_all(unix_, true);
    case kDisk: disk_ready_ = true; return;
    case kFence:
      // The only event a fence is watched for is that its write end is closed. The descriptor is
      // closed with it, which takes it out of epoll.
      return node_->fences().lift(id);
    case kSession:
      if (Session* session = node_->find_session(id)) serve(*session, events);
      return;
  }
}

void Server::accept_all(const File& listener, bool local) {
  for (int i = 0; i < 64; ++i) {
    File socket(accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket) {
      if (errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM) return;
      // The connection stays in the backlog: asking again at once would only spin.
      for (const File* each : {&tcp_, &unix_})
        if (*each) epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, each->get(), nullptr);
      accept_paused_ = true;
      return;
    }
    make_way();
    if (node_->sessions().size() >= options_.max_connections) {
      ++node_->counters().rejected;
      continue;
    }
    if (!local) tune_tcp(socket.get()), keep_alive(socket.get());
    Session& session =
        node_->add_session(std::move(socket), local, local ? nullptr : options_.tls);
    session.interest = EPOLLIN;
    if (watch(session.socket(), kSession, session.id, EPOLLIN) != 0) end(session.id);
  }
}

// A connection that has said no HELLO may not keep out a client: the oldest of them gives way. Where
// there are tokens, such connections may be a part of all only.
void Server::make_way() {
  const auto& strangers = node_->strangers();
  const size_t part = options_.tenants.empty() ? 1 : TenantLimits::kStrangersPart;
  const bool many = strangers.size() >= std::max<size_t>(options_.max_connections / part, 1);
  const bool full = node_->sessions().size() >= options_.max_connections;
  if (strangers.empty() || !(many || full)) return;
  ++node_->counters().rejected;
  end(*strangers.begin());
}

void Server::sweep() {
  node_->read_notes();
  node_->expire_reservations();
  const std::chrono::duration<double> deadline(options_.frame_deadline_s);
  const std::chrono::duration<double> hello(options_.hello_deadline_s);
  std::vector<uint64_t> stalled;
  for (const auto& [id, session] : node_->sessions())
    if (session->stalled(node_->now(), session->greeted ? deadline : std::min(deadline, hello)))
      stalled.push_back(id);
  for (const uint64_t id : stalled) {
    ++node_->counters().stalled;
    end(id);
  }
  if (accept_paused_ && !node_->draining()) {
    accept_paused_ = false;
    watch(tcp_.get(), kListenTcp, 0, EPOLLIN);
    if (unix_) watch(unix_.get(), kListenUnix, 0, EPOLLIN);
  }
  const auto quarter = std::chrono::duration_cast<Clock::duration>(deadline / 4);
  next_sweep_ = node_->now() + std::clamp<Clock::duration>(quarter, std::chrono::milliseconds(5),
                                                           kMaxSweepInterval);
}

}  // namespace kv
