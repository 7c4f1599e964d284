// Clients on the node's host: what they post, log and pin, as the node takes it.
#include <sys/mman.h>

#include <algorithm>

#include "node_parts.h"

namespace {

using namespace kv;
using namespace kv::test;

// A session with notes, and the client's side of them.
struct Mapped {
  Mapped(NodeParts& parts, PoolAccess access) : session(parts.connect(access)) {
    Outgoing reply;
    directory_bytes = parts.local.share(session, reply);
    uint8_t* const notes = parts.local.notes(session.id);
    CHECK(notes != nullptr);
    posts.emplace(notes + NotesLayout::kPuts);
    uses.emplace(notes + NotesLayout::kUses);
    pins.emplace(notes + NotesLayout::kPins);
  }
  LendReply lend(NodeParts& parts) {
    CHECK(parts.local.lend(session, {.op = Op::kLend, .request_id = 7}, {1, 0, {}}));
    return parts.answer<LendReply>(session);
  }
  // Writes block i, the first of a chain, into a lent slot.
  void post(NodeParts& parts, const LendReply& lent, size_t at, uint32_t i) {
    const std::string bytes = bytes_of(i);
    std::memcpy(parts.pool.data() + lent.offsets[at], bytes.data(), bytes.size());
    posts->post({name(i), {}, lent.offsets[at], lent.generations[at],
                 crc32c(bytes.data(), bytes.size()), 1, 0});
  }
  Session& session;
  uint64_t directory_bytes = 0;
  std::optional<PutRing> posts;
  std::optional<UseLog> uses;
  std::optional<PinBoard> pins;
};

void the_descriptor_of_the_notes_is_closed_when_the_reply_is_sent() {
  NodeParts parts;
  Session& session = parts.connect(PoolAccess::kWrite);
  Outgoing reply;
  CHECK(parts.local.share(session, reply) == parts.directory.size());
  CHECK(reply.fds.size() == 2 && reply.fds[0] == parts.directory.readable_fd());
  const int notes = reply.fds[1];
  CHECK(notes == reply.owned_fd.get() && fcntl(notes, F_GETFD) >= 0);
  reply.frame = encode_frame(Op::kHello, Status::kOk, 1, *std::make_unique<HelloReply>());
  parts.replies.queue(session, std::move(reply));
  CHECK(parts.answers(session).size() == 1);
  CHECK(fcntl(notes, F_GETFD) < 0);  // closed: descriptors are scarce
}

void a_reader_that_cannot_write_is_lent_nothing() {
  NodeParts parts;
  Mapped reader(parts, PoolAccess::kRead);
  CHECK(parts.local.lend(reader.session, {.op = Op::kLend, .request_id = 7}, {1, 0, {}}));
  parts.answer<ErrorReply>(reader.session, Status::kNotAllowed);
  CHECK(parts.local.lent_bytes() == 0);
}

void a_posted_part_is_found_once_the_posts_are_taken() {
  NodeParts parts;
  Mapped writer(parts, PoolAccess::kWrite);
  const LendReply lent = writer.lend(parts);
  CHECK(lent.offsets.size() == 4 && lent.most == 4 && parts.local.lent_bytes() == 4 * kPartSlot);
  writer.post(parts, lent, 1, 10);
  CHECK(!parts.has(10));
  parts.local.take_posts(false);
  CHECK(parts.has(10) && parts.local.lent_bytes() == 3 * kPartSlot);
  writer.post(parts, lent, 2, 10);                 // it is there
  writer.post(parts, lent, 1, 11);                 // the slot is not the client's any more
  parts.local.take_posts(false);
  const auto& posts = parts.state.counters.posts.values;
  CHECK(posts == (std::array<uint64_t, 3>{1, 1, 1}) && !parts.has(11));
  CHECK(parts.state.counters.bytes_in.values[0] == kPartBytes);
  CHECK(writer.lend(parts).offsets.size() == 4);  // as many as before, none of them twice
}

void writers_see_that_a_request_waits_and_a_wait_is_answered_by_a_post() {
  NodeParts parts;
  Mapped writer(parts, PoolAccess::kWrite);
  Session& waiter = parts.connect(PoolAccess::kNone);
  const LendReply lent = writer.lend(parts);
  const auto hashes = chain(10, 1);
  CHECK(parts.landings.wait(waiter, {.op = Op::kWait, .request_id = 70},
                            {1, 1, 20'000, 0, span_of(hashes)}));
  CHECK(writer.posts->state() == PutRing::State::kQuiet);
  parts.local.take_posts(parts.landings.pending() != 0);
  CHECK(writer.posts->state() == PutRing::State::kCalling);
  // One that comes now sees it, too.
  CHECK(Mapped(parts, PoolAccess::kWrite).posts->state() == PutRing::State::kCalling);
  writer.post(parts, lent, 0, 10);
  parts.local.take_posts(true);
  CHECK(parts.answer<WaitReply>(waiter).blocks == 1);
  parts.local.take_posts(parts.landings.pending() != 0);
  CHECK(writer.posts->state() == PutRing::State::kQuiet);
}

void logged_uses_count_as_hits_and_as_bytes() {
  NodeParts parts;
  Mapped writer(parts, PoolAccess::kWrite);
  writer.post(parts, writer.lend(parts), 0, 10);
  parts.local.take_posts(false);
  const DirectoryView view(parts.directory.data(), parts.directory.size());
  const auto place = view.find({{1, name(10)}, 1});
  CHECK(place);
  writer.uses->add({place->index, UseLog::Kind::kMatched});
  writer.uses->add({place->index, UseLog::Kind::kRead});
  writer.uses->add({place->index, UseLog::Kind::kKept});  // a put that found it: no hit
  writer.uses->add({place->index + 1, UseLog::Kind::kRead});
  parts.local.count_uses();
  parts.local.count_uses();
  CHECK(parts.state.counters.hits.values[0] == 2);
  CHECK(parts.state.counters.bytes_out.values[0] == kPartBytes);
}

void a_block_that_is_read_in_place_is_not_evicted() {
  NodeParts parts(4);
  Mapped writer(parts, PoolAccess::kWrite);
  const LendReply lent = writer.lend(parts);
  for (uint32_t i = 0; i < 4; ++i) writer.post(parts, lent, i, 10 + i);
  parts.local.take_posts(false);
  const auto pin = writer.pins->pin(lent.offsets[0]);
  writer.pins->count(1, 1);
  CHECK(pin && parts.local.busy(writer.session.id) && !parts.local.posting(writer.session.id));
  CHECK(parts.local.leases() == 1 && parts.local.leased_blocks() == 1);
  bool no_space = false;
  for (uint32_t i = 20; i < 24; ++i)
    parts.writes.reserve_one({{1, name(i)}, 1}, {}, kPartBytes, writer.session.writer(), no_space);
  CHECK(no_space && parts.has(10) && !parts.has(11) && !parts.has(13));
  writer.pins->unpin(*pin);
  parts.state.table.recheck_kept();
  no_space = false;
  parts.writes.reserve_one({{1, name(30)}, 1}, {}, kPartBytes, writer.session.writer(), no_space);
  CHECK(!no_space && !parts.has(10) && !parts.local.busy(writer.session.id));
  for (const Slot& slot : parts.writes.take_slots(writer.session)) parts.state.table.release(slot);
}

void a_session_that_ends_leaves_its_lent_slots_and_its_last_posts() {
  NodeParts parts;
  Mapped writer(parts, PoolAccess::kWrite);
  const LendReply lent = writer.lend(parts);
  writer.posts->set_writing(true);
  CHECK(parts.local.posting(writer.session.id));
  writer.post(parts, lent, 0, 10);
  const std::vector<Slot> slots = parts.local.end(writer.session);
  CHECK(slots.size() == 3 && parts.has(10) && parts.local.lent_bytes() == 0);
  CHECK(parts.local.notes(writer.session.id) == nullptr);
  CHECK(parts.local.end(writer.session).empty());
}

}  // namespace

int main() {
  the_descriptor_of_the_notes_is_closed_when_the_reply_is_sent();
  a_reader_that_cannot_write_is_lent_nothing();
  a_posted_part_is_found_once_the_posts_are_taken();
  writers_see_that_a_request_waits_and_a_wait_is_answered_by_a_post();
  logged_uses_count_as_hits_and_as_bytes();
  a_block_that_is_read_in_place_is_not_evicted();
  a_session_that_ends_leaves_its_lent_slots_and_its_last_posts();
}
