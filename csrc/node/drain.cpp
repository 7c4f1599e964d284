// What a node that leaves lets end, and what it waits for.
#include <sys/socket.h>

#include <algorithm>

#include "node/node.h"

namespace kv {

using wire::Status;

namespace {

bool reads_in_place(const Session& session) { return session.pins && session.pins->in_use(); }

}  // namespace

void Node::end_hopeless_waits() {
  // Asked before the posts are taken: who has ended its posting by now has posted what will be taken.
  const bool hopeless = std::ranges::none_of(sessions_, [](const auto& each) {
    const Session& session = *each.second;
    return session.put != nullptr || !session.reservations.empty() || session.posting();
  });
  take_posts();
  if (!hopeless) return;
  for (auto& wait : waits_.all()) answer_wait(std::move(wait), Status::kTimeout);
}

std::vector<uint64_t> Node::idle_sessions() const {
  std::vector<uint64_t> idle;
  for (const auto& [id, session] : sessions_)
    if (session->idle() && leases_.blocks_of(id) == 0 && !reads_in_place(*session))
      idle.push_back(id);
  return idle;
}

bool Session::idle() const {
  if (output_pending()) return false;
  if (closing) return true;
  if (put != nullptr || unfinished != nullptr || input.size() != 0 || !reservations.empty() || waits != 0 || parked != 0 ||
      attachment == Attachment::kAsked || posting())
    return false;
  // A request that has come but has not been looked at is under way.
  if (tls_ != nullptr && tls_->readable()) return false;
  char next;
  return recv(socket_.get(), &next, sizeof next, MSG_PEEK | MSG_DONTWAIT) <= 0;
}

}  // namespace kv
