// The server's loop, seen from one connection: what is read, handled and sent in one turn.
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>

#include "node/put_intake.h"
#include "server/server.h"

namespace kv {

using wire::HeaderError;
using wire::Op;
using wire::Status;

namespace {

// What one connection may have read or sent before the others get their turn.
constexpr size_t kTurnBytes = 2u << 20;
constexpr size_t kTurnFrames = 64;
constexpr size_t kReadBytes = 16u << 10;       // when it is not known what comes
constexpr size_t kReadMostBytes = 256u << 10;  // of a body that has been announced
// Of a payload: so few wake-ups that they do not count, soon enough for the caches.
constexpr size_t kWakeBytes = 256u << 10;

const char* why_refused(HeaderError error) {
  switch (error) {
    case HeaderError::kMagic: return "not a kvstore frame";
    case HeaderError::kVersion: return "this server speaks version 3 of the protocol";
    case HeaderError::kOp: return "unknown op";
    default: return "a header field is out of range";
  }
}

// A request's own limits, beyond those of any header.
bool is_request(const wire::Header& header) {
  return header.status == Status::kOk && header.body_bytes <= wire::max_body_bytes(header.op) &&
         (header.op == Op::kPut || header.payload_bytes == 0);
}

}  // namespace

void Server::serve(Session& session, uint32_t events) {
  const uint64_t id = session.id;
  if ((events & EPOLLERR) != 0) return end(id);
  if ((events & (EPOLLIN | EPOLLHUP)) != 0) {
    if (session.paused || session.closing) {
      // It is not being read; a peer that is gone would be reported for ever.
      if ((events & EPOLLHUP) != 0) return end(id);
    }
    if (!session.paused && !session.queued && read_some(session) == IoState::kEnded)
      return end(id);
  }
  // At once, not when all are served: its peer goes on while we serve the next.
  if ((events & EPOLLOUT) != 0 || session.dirty) flush(session);
}

IoState Server::read_some(Session& session) {
  if (session.closing) {
    // What a refused peer still sends is dropped, so that it can read why.
    iovec span{node_->scratch().data(), node_->scratch().size()};
    const IoState state = session.drop(span);
    return state == IoState::kOpen ? IoState::kWouldBlock : state;
  }
  node_->begin_turn();
  size_t budget = kTurnBytes;
  IoState state = IoState::kOpen;
  while (state == IoState::kOpen && !session.closing && !session.paused) {
    if (budget == 0 || node_->turn_is_over()) {
      requeue(session);
      return IoState::kOpen;
    }
    state = session.put != nullptr ? read_payload(session, budget) : read_frames(session, budget);
  }
  // Of a handshake, which has no replies of ours: the socket did not take all of it.
  if (session.sealed_pending()) node_->touch(session);
  if (state == IoState::kBroken) refuse_tls(session);
  return state;
}

// The peer gets a second to read why, as of any refusal: TLS's alert, or, where it speaks none, a
// reply that it understands.
void Server::refuse_tls(Session& session) {
  ++node_->counters().tls_failures;
  session.closing = true;
  if (wire::Header header; session.give_up_tls(header))
    node_->refuse_frame(session, header, Status::kBadRequest,
                        "this address speaks TLS: write kvs://HOST:PORT");
  node_->touch(session);
}

IoState Server::read_payload(Session& session, size_t& budget) {
  const auto begun = std::chrono::steady_clock::now();
  PutIntake& put = *session.put;
  size_t received = put.feed(session.input.data(), session.input.size());
  session.input.consume(received);
  IoState state = IoState::kOpen;
  if (!put.done() && session.input.size() == 0) {
    iovec spans[3];
    size_t count = put.spans(spans);
    spans[0].iov_len = std::min(spans[0].iov_len, std::max<size_t>(budget, 1));
    const size_t due = spans[0].iov_len + (count == 2 ? spans[1].iov_len : 0);
    const bool whole = due <= budget;
    // What follows the payload is asked for along with it: where nothing does, as a rule, no other
    // read has to find that out.
    const bool beyond = whole && put.at_last() && !session.sealed();
    if (beyond) spans[count++] = {session.input.room(kReadBytes), kReadBytes};
    session.wake_at(std::min(due, kWakeBytes));
    size_t fresh = 0;
    state = session.receive_into(spans, whole ? count : 1, fresh);
    if (fresh > due) session.input.added(fresh - due);
    session.drained = beyond && fresh >= due && fresh < due + kReadBytes;
    fresh = std::min(fresh, due);
    if (fresh != 0) put.filled(fresh);
    received += fresh;
  }
  budget -= std::min(budget, received);
  session.payload_progress(received, node_->now());
  put.add_time(std::chrono::steady_clock::now() - begun);
  if (put.done()) {
    session.wake_at(1);
    node_->count_time(Op::kPut, put.spent());
    node_->finish_put(session);
    session.input_progress(node_->now());
  }
  return state;
}

// One frame, or one read.
IoState Server::read_frames(Session& session, size_t& budget) {
  size_t missing = 0;
  switch (parse_frame(*node_, session, missing)) {
    case Parse::kHandled:
      session.input_progress(node_->now());
      session.paused = session.output_full();
      budget -= std::min(budget, kTurnBytes / kTurnFrames);
      return IoState::kOpen;
    case Parse::kUnfinished: session.input_progress(node_->now()); return IoState::kOpen;
    case Parse::kRefused: session.closing = true; return IoState::kOpen;
    case Parse::kMore: break;
  }
  if (session.drained) return session.drained = false, IoState::kWouldBlock;
  const bool idle = session.input.size() == 0 && session.greeted;
  size_t received = 0;
  const size_t asked = std::clamp(missing, kReadBytes, kReadMostBytes);
  const IoState state = session.receive(asked, received);
  // The time for a frame starts with its first byte.
  if (idle && received != 0) session.input_progress(node_->now());
  budget -= std::min(budget, received);
  // It has given all that it had; if more comes, epoll tells.
  session.drained = state == IoState::kOpen && received < asked && !session.sealed();
  return state;
}

Server::Parse Server::parse_frame(Node& node, Session& session, size_t& missing) {
  const size_t have = session.input.size();
  missing = wire::kHeaderBytes;
  if (have < wire::kHeaderBytes) return Parse::kMore;
  wire::Header header;
  const HeaderError error = wire::read_header(session.input.data(), header);
  // Of nobody who has not said HELLO is more than that kept.
  const bool early = error == HeaderError::kNone && !session.greeted && header.op != Op::kHello;
  if (error != HeaderError::kNone || early || !is_request(header)) {
    const bool version = error == HeaderError::kVersion;
    node.refuse_frame(session, header,
                      version ? Status::kUnsupportedVersion : Status::kBadRequest,
                      early ? "the first request must be HELLO" : why_refused(error));
    return Parse::kRefused;
  }
  const size_t frame = wire::kHeaderBytes + header.body_bytes;
  missing = frame - std::min(frame, have);
  if (have < frame) return Parse::kMore;
  const bool go_on = node.handle(session, header, session.input.data() + wire::kHeaderBytes);
  if (session.unfinished != nullptr) return Parse::kUnfinished;
  session.input.consume(frame);
  return go_on ? Parse::kHandled : Parse::kRefused;
}

void Server::requeue(Session& session) {
  if (std::exchange(session.queued, true)) return;
  queued_.push_back(session.id);
}

void Server::resume_queued() {
  for (const uint64_t id : std::exchange(queued_, {})) {
    Session* session = node_->find_session(id);
    if (session == nullptr) continue;
    session->queued = false;
    if (session->paused) continue;
    if (read_some(*session) == IoState::kEnded) end(id);
    else if (session->dirty) flush(*session);
  }
}

void Server::flush_dirty() {
  for (const uint64_t id : node_->take_dirty()) {
    Session* session = node_->find_session(id);
    if (session != nullptr && session->dirty) flush(*session);
  }
}

void Server::flush(Session& session) {
  session.dirty = false;
  const IoState state = session.flush(kTurnBytes, node_->now());
  if (state == IoState::kEnded || state == IoState::kBroken) return end(session.id);
  if (session.paused && session.output_relieved()) {
    session.paused = false;
    requeue(session);
  }
  if (session.closing && !session.output_pending()) session.finish_closing(node_->now());
  set_interest(session);
}

void Server::set_interest(Session& session) {
  const uint32_t wanted = (session.paused ? 0u : uint32_t{EPOLLIN}) |
                          (session.output_pending() ? uint32_t{EPOLLOUT} : 0u);
  if (wanted == session.interest) return;
  session.interest = wanted;
  epoll_event event{};
  event.events = wanted;
  event.data.u64 = (session.id << kKindBits) | kSession;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, session.socket(), &event) != 0) end(session.id);
}

void Server::end(uint64_t id) {
  const std::optional<uint64_t> fence = node_->end_session(id);
  // Should epoll not take it, the slots stay out of use: memory lost, no byte wrong.
  if (fence) watch(node_->fences().descriptor(*fence), kFence, *fence, 0);
}

}  // namespace kv
