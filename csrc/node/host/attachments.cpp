#include "node/host/attachments.h"

namespace kv {

using wire::Header;
using wire::Status;

bool Attachments::attach(Session& session, const Header& header,
                         const wire::AttachRequest& request) {
  if (session.access != wire::PoolAccess::kNone || session.attachment != Attachment::kNone)
    return replies_.fail(session, header, Status::kNotAllowed,
                         "this connection has the pool already");
  // An attached client reaches all of the pool: with several tenants none may.
  if (most_ == 0 || state_.options.tenants.count() > 1)
    return replies_.fail(session, header, Status::kNotAllowed, "this store offers no RDMA");
  if (state_.draining)
    return replies_.fail(session, header, Status::kNotAllowed, "the store is draining");
  if (entries_.size() >= most_) {
    ++state_.counters.attaches[Attached::kRefused];
    return replies_.fail(session, header, Status::kLimit,
                         "it has as many RDMA connections as it may");
  }
  session.attachment = Attachment::kAsked;
  entries_.try_emplace(session.id, Entry{header.request_id, Phase::kQueued, std::nullopt});
  push({session.id, true, request.rail, std::string(request.card)});
  return true;
}

int Attachments::offer(size_t most) {
  if (ready_.get() < 0)
    if (const int error = ready_.open()) return error;
  most_ = most;
  return 0;
}

void Attachments::push(AttachEvent event) {
  events_.push_back(std::move(event));
  ready_.signal();
}

void Attachments::drop_events(uint64_t session) {
  std::erase_if(events_, [session](const AttachEvent& event) { return event.session == session; });
}

std::vector<AttachEvent> Attachments::take_events() {
  ready_.clear();
  for (const AttachEvent& event : events_)
    if (const auto found = entries_.find(event.session);
        found != entries_.end() && found->second.phase == Phase::kQueued)
      found->second.phase = Phase::kTaken;
  return std::exchange(events_, {});
}

// The session that waits for the host's answer, or null, and the header of its request.
Session* Attachments::answer(uint64_t id, bool attached, Header& request) {
  const auto found = entries_.find(id);
  const bool waits = found != entries_.end() && found->second.phase == Phase::kTaken;
  Session* const session = waits ? state_.find_session(id) : nullptr;
  if (waits) {
    request.op = wire::Op::kAttach;
    request.request_id = found->second.request_id;
    if (attached) found->second.phase = Phase::kAttached;
    else entries_.erase(found);
  }
  ++state_.counters.attaches[session == nullptr ? Attached::kGone
                             : attached         ? Attached::kDone
                                                : Attached::kRefused];
  return session;
}

bool Attachments::attached(uint64_t id, std::string_view card) {
  Header request;
  Session* const session = answer(id, true, request);
  if (session == nullptr) return false;
  session->attachment = Attachment::kDone;
  replies_.send(*session, request, wire::AttachReply{card});
  return true;
}

bool Attachments::refuse(uint64_t id, Status status, std::string_view why) {
  Header request;
  Session* const session = answer(id, false, request);
  if (session == nullptr) return false;
  session->attachment = Attachment::kNone;
  return replies_.fail(*session, request, status, why);
}

bool Attachments::end(const Session& session, bool in_use, std::vector<Slot>& slots) {
  const auto found = entries_.find(session.id);
  if (found == entries_.end() || found->second.phase == Phase::kEnded) return false;
  if (found->second.phase == Phase::kQueued) {  // the host does not know of it
    drop_events(session.id);
    entries_.erase(found);
    return false;
  }
  found->second.phase = Phase::kEnded;
  push({session.id, false, 0, {}});
  if (in_use) ++state_.counters.broken_attachments;
  if (slots.empty()) return true;
  state_.counters.fenced += slots.size();
  found->second.fence = state_.fences.raise(File(), std::move(slots), session.client);
  return true;
}

void Attachments::fenced(uint64_t session) {
  const auto found = entries_.find(session);
  if (found == entries_.end() || found->second.phase != Phase::kEnded) return;
  if (found->second.fence) state_.fences.lift(*found->second.fence);
  entries_.erase(found);
  drop_events(session);  // the host may not have taken the event to end it
}

}  // namespace kv
