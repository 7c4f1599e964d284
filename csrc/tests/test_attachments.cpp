// RDMA attachments without a server: the events for the host, and what its answers do.
#include "node_parts.h"

namespace {

using namespace kv;
using namespace kv::test;

Session& asking(NodeParts& parts, uint64_t request_id = 50) {
  Session& session = parts.connect(PoolAccess::kNone);
  CHECK(parts.attachments.attach(session, {.op = Op::kAttach, .request_id = request_id},
                                 {1, "the client's card"}));
  return session;
}

std::vector<Slot> one_slot(NodeParts& parts) {
  return {*parts.state.table.lend(0, kPartBytes, nullptr, Slab::kAnyRegion)};
}

void a_request_is_answered_when_the_host_has_a_queue_pair() {
  NodeParts parts;
  CHECK(parts.attachments.ready_fd() == -1 && parts.attachments.offer(2) == 0);
  Session& session = asking(parts);
  CHECK(!parts.attachments.attached(session.id, "early"));  // before the host has taken the event
  const auto events = parts.attachments.take_events();
  CHECK(events.size() == 1 && events[0].begins && events[0].session == session.id);
  CHECK(events[0].rail == 1 && events[0].card == "the client's card");
  CHECK(parts.attachments.attached(session.id, "the server's card"));
  CHECK(parts.answer<AttachReply>(session).card == "the server's card");
  CHECK(parts.last.header.request_id == 50 && session.writes_pool());
  CHECK(!parts.attachments.attached(session.id, "twice"));
}

void a_refusal_frees_the_place() {
  NodeParts parts;
  CHECK(parts.attachments.offer(1) == 0);
  Session& session = asking(parts);
  asking(parts);
  CHECK(parts.attachments.size() == 1 && parts.state.counters.attaches[Attached::kRefused] == 1);
  CHECK(parts.attachments.take_events().size() == 1);
  CHECK(parts.attachments.refuse(session.id, Status::kLimit, "no queue pair is left"));
  CHECK(parts.answer<ErrorReply>(session, Status::kLimit).message == "no queue pair is left");
  CHECK(parts.attachments.size() == 0 && !session.writes_pool());
}

void slots_stay_fenced_until_the_host_has_ended_the_queue_pair() {
  NodeParts parts;
  CHECK(parts.attachments.offer(1) == 0);
  Session& session = asking(parts);
  CHECK(parts.attachments.take_events().size() == 1);
  CHECK(parts.attachments.attached(session.id, "card"));
  std::vector<Slot> slots = one_slot(parts);
  parts.state.holds.took(session.client, kPartBytes);
  CHECK(parts.attachments.end(session, true, slots));
  CHECK(parts.state.fences.slots() == 1 && parts.attachments.size() == 1);
  CHECK(parts.state.counters.broken_attachments == 1);
  const auto events = parts.attachments.take_events();
  CHECK(events.size() == 1 && !events[0].begins && events[0].session == session.id);
  parts.attachments.fenced(session.id);
  CHECK(parts.state.fences.slots() == 0 && parts.attachments.size() == 0);
  CHECK(parts.state.slab.free_bytes() == parts.pool.size() && parts.state.holds.empty());
}

void a_request_that_the_host_has_not_taken_ends_without_an_event() {
  NodeParts parts;
  CHECK(parts.attachments.offer(1) == 0);
  Session& session = asking(parts);
  std::vector<Slot> none;
  CHECK(!parts.attachments.end(session, false, none));
  CHECK(parts.attachments.take_events().empty() && parts.attachments.size() == 0);
}

void nothing_is_offered_while_the_node_drains() {
  NodeParts parts;
  CHECK(parts.attachments.offer(1) == 0);
  parts.state.draining = true;
  parts.answer<ErrorReply>(asking(parts), Status::kNotAllowed);
  parts.state.draining = false;
  CHECK(parts.attachments.offer(0) == 0);
  parts.answer<ErrorReply>(asking(parts), Status::kNotAllowed);
}

}  // namespace

int main() {
  a_request_is_answered_when_the_host_has_a_queue_pair();
  a_refusal_frees_the_place();
  slots_stay_fenced_until_the_host_has_ended_the_queue_pair();
  a_request_that_the_host_has_not_taken_ends_without_an_event();
  nothing_is_offered_while_the_node_drains();
}
