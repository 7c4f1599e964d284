// ATTACH, and what the host does about it.
#include "node/node.h"

namespace kv {

using wire::PoolAccess;
using wire::Status;

bool Node::attach(Session& session, const Header& header, const wire::AttachRequest& request) {
  if (session.access != PoolAccess::kNone || session.attachment != Attachment::kNone)
    return fail(session, header, Status::kNotAllowed, "this connection has the pool already");
  // Whoever attaches reaches all of the pool: of several tenants nobody does.
  if (!attachments_.offered() || options_.tenants.count() > 1)
    return fail(session, header, Status::kNotAllowed, "this store offers no RDMA");
  if (draining_) return fail(session, header, Status::kNotAllowed, "the store leaves");
  if (attachments_.full()) {
    ++counters_.attaches[Attached::kRefused];
    return fail(session, header, Status::kLimit, "it has as many RDMA connections as it may");
  }
  session.attachment = Attachment::kAsked;
  attachments_.ask(session.id, header.request_id, request.rail, request.card);
  return true;
}

bool Node::attached(uint64_t id, std::string_view card) {
  const std::optional<uint64_t> request_id = attachments_.attached(id);
  Session* const session = request_id ? find_session(id) : nullptr;
  if (session == nullptr) {
    ++counters_.attaches[Attached::kGone];
    return false;
  }
  session->attachment = Attachment::kDone;
  ++counters_.attaches[Attached::kDone];
  Header header;
  header.op = wire::Op::kAttach;
  header.request_id = *request_id;
  reply(*session, header, wire::AttachReply{card});
  return true;
}

bool Node::refuse_attachment(uint64_t id, Status status, std::string_view why) {
  const std::optional<uint64_t> request_id = attachments_.refused(id);
  Session* const session = request_id ? find_session(id) : nullptr;
  ++counters_.attaches[session == nullptr ? Attached::kGone : Attached::kRefused];
  if (session == nullptr) return false;
  session->attachment = Attachment::kNone;
  Header header;
  header.op = wire::Op::kAttach;
  header.request_id = *request_id;
  fail(*session, header, status, why);
  return true;
}

// The slots stay out of use until the host says that nothing writes them any more.
bool Node::end_attachment(const Session& session, bool in_use, std::vector<Slot>& slots) {
  if (session.attachment == Attachment::kNone || !attachments_.ended(session.id)) return false;
  if (in_use) ++counters_.broken_attachments;
  if (slots.empty()) return true;
  counters_.fenced += slots.size();
  attachments_.fence_with(session.id, fences_.raise(File(), std::move(slots), session.client));
  return true;
}

void Node::fenced(uint64_t id) {
  if (const std::optional<uint64_t> fence = attachments_.fenced(id)) fences_.lift(*fence);
}

}  // namespace kv
