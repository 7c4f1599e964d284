#include "server/connections.h"

#include <malloc.h>
#include <sys/socket.h>

#include "base/tcp_options.h"
#include "node/put_intake.h"

namespace kv {

using wire::Status;

namespace {

// What one connection may have read or sent before the others get their turn.
constexpr size_t kTurnBytes = 2u << 20;
constexpr size_t kTurnFrames = 64;
constexpr size_t kReadBytes = 16u << 10;       // if it is not known what comes
constexpr size_t kReadMostBytes = 256u << 10;  // of a body that has been announced
// Of a payload: few wake-ups, and soon enough for the bytes to be still in the caches.
constexpr size_t kWakeBytes = 256u << 10;
constexpr int kAcceptsInARow = 64;
constexpr size_t kTrimBytes = 8u << 20;
// One in so many more than there may be: their HELLO is answered with the reason.
constexpr size_t kSparePart = 64;

// The limits of a request, beyond those of any header.
bool is_request(const wire::Header& header) {
  return header.status == Status::kOk && header.body_bytes <= wire::max_body_bytes(header.op) &&
         (header.op == wire::Op::kPut || header.payload_bytes == 0);
}

}  // namespace

Parse parse_frame(Node& node, Session& session, size_t& missing) {
  const size_t have = session.input.size();
  missing = wire::kHeaderBytes;
  if (have < wire::kHeaderBytes) return Parse::kMore;
  wire::Header header;
  const char* error = wire::read_header(session.input.data(), header);
  // Before the HELLO no more than a header is kept of anything else.
  if (error == nullptr && !session.greeted && header.op != wire::Op::kHello)
    error = "the first request must be HELLO";
  if (error == nullptr && !is_request(header)) error = wire::kBadField;
  if (error != nullptr) {
    const bool version = error == wire::kOtherVersion;
    node.replies().refuse(session, header, error,
                          version ? Status::kUnsupportedVersion : Status::kBadRequest);
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

Connections::Connections(const ServerOptions& options, Node& node, Poller& poller, File tcp,
                         File unix)
    : options_(options), node_(node), poller_(poller), tcp_(std::move(tcp)),
      unix_(std::move(unix)) {}

int Connections::start() {
  if (const int error = poller_.add(tcp_.get(), Poller::kListenTcp, EPOLLIN)) return error;
  return unix_ ? poller_.add(unix_.get(), Poller::kListenUnix, EPOLLIN) : 0;
}

void Connections::stop_listening() {
  if (unix_) unlink(options_.unix_path.c_str());
  tcp_.reset();
  unix_.reset();
}

void Connections::accept_all(bool local) {
  const File& listener = local ? unix_ : tcp_;
  for (int i = 0; i < kAcceptsInARow; ++i) {
    File socket(accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket) {
      if (errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM) return;
      // The connection stays in the backlog: to watch it now would only spin.
      for (const File* each : {&tcp_, &unix_})
        if (*each) poller_.remove(each->get());
      accept_paused_ = true;
      return;
    }
    make_way();
    if (is_full()) {
      ++node_.counters().rejected;
      continue;
    }
    if (!local) tune_tcp(socket.get());
    Session& session = node_.add_session(std::move(socket), local, local ? nullptr : options_.tls);
    session.interest = EPOLLIN;
    if (poller_.add(session.socket(), Poller::kSession, EPOLLIN, session.id) != 0) end(session.id);
  }
}

void Connections::accept_again() {
  if (!accept_paused_ || node_.draining()) return;
  accept_paused_ = false;
  start();
}

bool Connections::is_full() const {
  const size_t most = options_.max_connections;
  return node_.sessions().size() >= most + std::max<size_t>(most / kSparePart, 1);
}

// A connection without a HELLO may not keep out a client: the oldest of them is ended. With tokens,
// such connections may be only a part of all. Neither may one that is idle; its client connects
// again when it needs to.
void Connections::make_way() {
  const auto& waiting = node_.awaiting_hello();
  const size_t part = options_.tenants.empty() ? 1 : TenantLimits::kAwaitingHelloPart;
  const bool many = waiting.size() >= std::max<size_t>(options_.max_connections / part, 1);
  std::optional<uint64_t> spare;
  if (!waiting.empty() && (many || is_full())) spare = *waiting.begin();
  else if (node_.greeted() >= options_.max_connections)
    spare = node_.spare_session(std::chrono::duration<double>(options_.spare_idle_s));
  if (!spare) return;
  ++node_.counters().rejected;
  end(*spare);
}

void Connections::serve(uint64_t id, uint32_t events) {
  Session* const found = node_.find_session(id);
  if (found == nullptr) return;
  Session& session = *found;
  if ((events & EPOLLERR) != 0) return end(id);
  if ((events & (EPOLLIN | EPOLLHUP)) != 0) {
    // It is not being read: a peer that is gone would be reported for ever.
    if ((session.paused || session.closing) && (events & EPOLLHUP) != 0) return end(id);
    if (!session.paused && !session.queued && read_some(session) == IoState::kEnded) return end(id);
  }
  // At once, not after all are served: the peer goes on while the next one is served.
  if ((events & EPOLLOUT) != 0 || session.dirty) flush(session);
}

IoState Connections::read_some(Session& session) {
  if (session.closing) {
    // What a refused peer still sends is dropped, so that it can read the reason.
    const IoState state = session.drop();
    return state == IoState::kOpen ? IoState::kWouldBlock : state;
  }
  node_.begin_turn();
  size_t budget = kTurnBytes;
  IoState state = IoState::kOpen;
  while (state == IoState::kOpen && !session.closing && !session.paused) {
    if (budget == 0 || node_.turn_is_over()) {
      requeue(session);
      return IoState::kOpen;
    }
    state = session.put != nullptr ? read_payload(session, budget) : read_frames(session, budget);
  }
  // A handshake makes output without a reply; the socket did not take all of it.
  if (session.sealed_pending()) node_.replies().touch(session);
  if (state == IoState::kBroken) refuse_tls(session);
  return state;
}

// The peer gets a second to read the reason: TLS's alert or, if it speaks no TLS, a plain reply.
void Connections::refuse_tls(Session& session) {
  ++node_.counters().tls_failures;
  session.closing = true;
  if (wire::Header header; session.give_up_tls(header))
    node_.replies().refuse(session, header, "this address speaks TLS: write kvs://HOST:PORT");
  node_.replies().touch(session);
}

IoState Connections::read_payload(Session& session, size_t& budget) {
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
    // Also reads what follows the payload: usually nothing, and no second read has to find that
    // out.
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
  session.payload_progress(received, node_.now());
  put.add_time(std::chrono::steady_clock::now() - begun);
  if (put.done()) {
    session.wake_at(1);
    node_.count_time(wire::Op::kPut, put.spent());
    node_.finish_put(session);
    session.input_progress(node_.now());
  }
  return state;
}

// One frame, or one read.
IoState Connections::read_frames(Session& session, size_t& budget) {
  size_t missing = 0;
  switch (parse_frame(node_, session, missing)) {
    case Parse::kHandled:
      session.input_progress(node_.now());
      session.paused = session.output_full();
      budget -= std::min(budget, kTurnBytes / kTurnFrames);
      return IoState::kOpen;
    case Parse::kUnfinished: session.input_progress(node_.now()); return IoState::kOpen;
    case Parse::kRefused: session.closing = true; return IoState::kOpen;
    case Parse::kMore: break;
  }
  if (session.drained) return session.drained = false, IoState::kWouldBlock;
  const bool idle = session.input.size() == 0 && session.greeted;
  size_t received = 0;
  const size_t asked = std::clamp(missing, kReadBytes, kReadMostBytes);
  const IoState state = session.receive(asked, received);
  // The time for a frame starts with its first byte.
  if (idle && received != 0) session.input_progress(node_.now());
  budget -= std::min(budget, received);
  // The socket has given all that it had; epoll reports when more comes.
  session.drained = state == IoState::kOpen && received < asked && !session.sealed();
  return state;
}

void Connections::requeue(Session& session) {
  if (!std::exchange(session.queued, true)) queued_.push_back(session.id);
}

void Connections::resume_queued() {
  for (const uint64_t id : std::exchange(queued_, {})) {
    Session* session = node_.find_session(id);
    if (session == nullptr) continue;
    session->queued = false;
    if (session->paused) continue;
    if (read_some(*session) == IoState::kEnded) end(id);
    else if (session->dirty) flush(*session);
  }
}

void Connections::flush_dirty() {
  for (const uint64_t id : node_.replies().take_dirty()) {
    Session* session = node_.find_session(id);
    if (session != nullptr && session->dirty) flush(*session);
  }
}

void Connections::flush(Session& session) {
  session.dirty = false;
  const IoState state = session.flush(kTurnBytes, node_.now());
  if (state == IoState::kEnded || state == IoState::kBroken) return end(session.id);
  if (session.paused && session.output_relieved()) {
    session.paused = false;
    requeue(session);
  }
  if (session.closing && !session.output_pending()) session.finish_closing(node_.now());
  set_interest(session);
}

void Connections::set_interest(Session& session) {
  const uint32_t wanted = (session.paused ? 0u : uint32_t{EPOLLIN}) |
                          (session.output_pending() ? uint32_t{EPOLLOUT} : 0u);
  if (wanted == session.interest) return;
  session.interest = wanted;
  if (poller_.change(session.socket(), Poller::kSession, wanted, session.id) != 0) end(session.id);
}

void Connections::trim() {
  if (unread_bytes_ < kTrimBytes) return;
  unread_bytes_ = 0;
#ifdef __GLIBC__
  malloc_trim(0);  // small blocks between others: free() alone keeps their pages
#endif
}

void Connections::end(uint64_t id) {
  if (const Session* session = node_.find_session(id)) unread_bytes_ += session->output_bytes();
  const std::optional<uint64_t> fence = node_.end_session(id);
  // Should epoll not take it, the slots stay out of use: memory lost, no byte wrong.
  if (fence) poller_.add(node_.fences().descriptor(*fence), Poller::kFence, 0, *fence);
}

void Connections::end_stalled() {
  const std::chrono::duration<double> frame(options_.frame_deadline_s);
  const std::chrono::duration<double> hello(options_.hello_deadline_s);
  std::vector<uint64_t> stalled;
  for (const auto& [id, session] : node_.sessions())
    if (session->stalled(node_.now(), session->greeted ? frame : std::min(frame, hello)))
      stalled.push_back(id);
  node_.counters().stalled += stalled.size();
  for (const uint64_t id : stalled) end(id);
}

void Connections::end_idle() {
  for (const uint64_t id : node_.idle_sessions()) end(id);
}

}  // namespace kv
