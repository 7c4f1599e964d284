// The server's door for the host of RDMA.
#include "server/server.h"

namespace kv {

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
  return node_->attached(session, card);
}

bool Server::refuse_attachment(uint64_t session, wire::Status status, std::string_view why) {
  const auto lock = enter();
  if (node_ == nullptr) return false;
  wake();
  return node_->refuse_attachment(session, status, why);
}

void Server::fenced(uint64_t session) {
  const auto lock = enter();
  if (node_ == nullptr) return;
  const Session* const living = node_->find_session(session);
  if (living != nullptr && living->attachment != Attachment::kNone) end(session);
  node_->fenced(session);
  wake();  // there may be nobody left to drain
}

}  // namespace kv
