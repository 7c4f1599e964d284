// What other threads ask of a running server. Each call holds the lock that the loop works under.
#include "server/server.h"

namespace kv {

// A request may have waited for what was posted.
void Server::read_notes() {
  node_->read_notes();
  if (node_->replies().has_dirty() || !node_->is_clear()) wake();
}

StatList::Values Server::stats() {
  const auto lock = enter();
  if (node_ == nullptr) return {};
  read_notes();
  return node_->stats();
}

uint64_t Server::purge(std::optional<std::string_view> token) {
  auto lock = enter();
  const Node* const node = node_.get();
  if (node == nullptr) return 0;
  const std::optional<uint32_t> tenant = token ? node_->admit(*token) : std::nullopt;
  if (token && !tenant) return 0;
  Purge purge = node_->begin_purge(tenant);
  // The server may be stopped meanwhile, and started again.
  for (bool done = false; !done && node_.get() == node;) {
    node_->begin_turn();
    done = purge.go_on();
    wake();  // the loop does what the disk has to do
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
  for (const uint64_t id : *ending) connections_->end(id);
  wake();  // others may have waited for what those held
  return ending->size();
}

bool Server::follow_tls(std::shared_ptr<const TlsContext> tls) {
  const auto lock = enter();
  if (options_.tls == nullptr || tls == nullptr) return false;
  options_.tls = std::move(tls);
  return true;
}

int Server::drain() {
  const auto lock = enter();
  if (node_ == nullptr) return -1;
  if (!node_->draining()) {
    node_->drain();
    connections_->stop_listening();
    wake();
  }
  return drained_.get();
}

bool Server::draining() {
  const auto lock = enter();
  return node_ != nullptr && node_->draining();
}

FlushResult Server::flush_disk(double timeout_s) {
  const auto until = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                        std::chrono::duration<double>(timeout_s));
  auto lock = enter();
  if (node_ == nullptr || node_->disk() == nullptr) return {"there is no disk"};
  const Node* const node = node_.get();
  node_->read_notes();
  const DiskTier::FlushMark mark = node_->disk()->begin_flush();
  wake();
  FlushResult result;
  while (true) {
    // The server may have been stopped meanwhile, and started again.
    if (node_.get() != node) return {"the node has stopped"};
    DiskTier& disk = *node_->disk();
    result.durable_blocks = disk.durable_blocks();
    result.skipped = disk.skipped();
    if (!disk.usable()) result.why = std::string("the disk is bypassed: ") + disk.fault_name();
    else if (disk.failed() != mark.failed) result.why = "blocks could not be written";
    else if (disk.flushed(mark)) return result;
    if (!result.why.empty()) return result;
    if (flushed_.wait_until(lock, until) == std::cv_status::timeout) {
      result.why = "the deadline passed";
      return result;
    }
  }
}

std::vector<DiskNotice> Server::take_notices() {
  const auto lock = enter();
  if (node_ == nullptr || node_->disk() == nullptr) return {};
  notice_.clear();
  return node_->disk()->take_notices();
}

int Server::offer_tiers(double timeout_s) {
  const auto lock = enter();
  if (node_ == nullptr || node_->tier_asks().offer(timeout_s) != 0) return -1;
  return node_->tier_asks().ready_fd();
}

std::vector<TierAsk> Server::take_tier_asks() {
  const auto lock = enter();
  if (node_ == nullptr) return {};
  return node_->tier_asks().take();
}

bool Server::answer_tier(uint64_t id, uint32_t found) {
  const auto lock = enter();
  if (node_ == nullptr) return false;
  wake();
  return node_->tier_asks().answer(id, found);
}

void Server::tell_tier(const std::string& name, bool up) {
  const auto lock = enter();
  if (node_ != nullptr) node_->tier_asks().tell(name, up);
}

int Server::offer_feed(size_t most) {
  const auto lock = enter();
  return node_ == nullptr ? -1 : node_->feeds().offer(most);
}

void Server::restart_feed(int feed) {
  const auto lock = enter();
  Feed* const found = node_ == nullptr ? nullptr : node_->feeds().find(feed);
  if (found != nullptr) found->restart();
}

Feed::Taken Server::take_feed(int feed) {
  const auto lock = enter();
  Feed* const found = node_ == nullptr ? nullptr : node_->feeds().find(feed);
  if (found == nullptr) return {};
  read_notes();
  return found->take();
}

std::optional<std::string> Server::document(std::string_view tenant, const Hash& digest) {
  const auto lock = enter();
  const std::string* const found = node_ == nullptr ? nullptr : node_->document(tenant, digest);
  return found == nullptr ? std::nullopt : std::optional(*found);
}

int Server::offer_attach(size_t most) {
  const auto lock = enter();
  if (node_ == nullptr || node_->attachments().offer(most) != 0) return -1;
  return node_->attachments().ready_fd();
}

std::vector<AttachEvent> Server::take_attach_events() {
  const auto lock = enter();
  if (node_ == nullptr) return {};
  return node_->attachments().take_events();
}

bool Server::attached(uint64_t session, std::string_view card) {
  const auto lock = enter();
  if (node_ == nullptr || card.size() > wire::kMaxCardBytes) return false;
  wake();  // the loop sends the reply
  return node_->attachments().attached(session, card);
}

bool Server::refuse_attachment(uint64_t session, wire::Status status, std::string_view why) {
  const auto lock = enter();
  if (node_ == nullptr) return false;
  wake();
  return node_->attachments().refuse(session, status, why);
}

void Server::fenced(uint64_t session) {
  const auto lock = enter();
  if (node_ == nullptr) return;
  const Session* const living = node_->find_session(session);
  if (living != nullptr && living->attachment != Attachment::kNone) connections_->end(session);
  node_->attachments().fenced(session);
  wake();  // it may have been the last one to drain
}

}  // namespace kv
