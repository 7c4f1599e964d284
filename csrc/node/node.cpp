#include "node/node.h"

#include "node/put_intake.h"

namespace kv {

using wire::Op;

Node::Node(NodeOptions options, uint8_t* pool, uint64_t pool_bytes, int readable_fd,
           int writable_fd, const Pool* directory)
    : state_(std::move(options), pool, pool_bytes), readable_fd_(readable_fd),
      writable_fd_(writable_fd) {
  if (directory != nullptr) local_.publish_in(*directory);
  state_.table.watch([this](const BlockKey& key) { feeds_.changed(key); });
}

// Before the other parts go: sessions give back what they hold.
Node::~Node() {
  state_.table.watch(nullptr);
  state_.sessions.clear();
}

void Node::set_now(TimePoint now) {
  state_.now = now;
  state_.table.set_now(std::chrono::duration<double>(now.time_since_epoch()).count());
  if (state_.disk != nullptr) state_.disk->set_now(now);
}

Session& Node::add_session(File socket, bool local, const std::shared_ptr<const TlsContext>& tls) {
  ++state_.counters.connections;
  const uint64_t id = ++last_session_;
  awaiting_hello_.insert(id);
  auto made = std::make_unique<Session>(id, std::move(socket), local, state_.now, tls);
  return *state_.sessions.emplace(id, std::move(made)).first->second;
}

std::optional<uint64_t> Node::end_session(uint64_t id) {
  const auto found = state_.sessions.find(id);
  if (found == state_.sessions.end()) return std::nullopt;
  // Out of sight first: nothing below may find it.
  const std::unique_ptr<Session> session = std::move(found->second);
  state_.sessions.erase(found);
  awaiting_hello_.erase(id);
  const bool in_use = state_.leases.blocks_of(id) != 0 || !session->reservations.empty() ||
                      !session->expired.empty();
  landings_.drop_session(*session);
  state_.leases.drop_session(id, Turn(state_.options.turn_blocks));
  promotion_.drop_session(id);
  tier_asks_.drop_session(id);
  if (session->greeted) --state_.counts_of(*session).connections;
  session->put.reset();
  std::vector<Slot> slots = local_.end(*session);
  for (const Slot& slot : writes_.take_slots(*session)) slots.push_back(slot);
  if (attachments_.end(*session, in_use, slots) || slots.empty()) return std::nullopt;
  state_.counters.fenced += slots.size();
  return state_.fences.raise(std::move(session->fence), std::move(slots), session->client);
}

template <class Part, class Body>
bool Node::with(Session& session, const Header& header, const uint8_t* body, Part& part,
                bool (Part::*act)(Session&, const Header&, const Body&)) {
  const std::optional<Body> request = wire::decode_body<Body>(body, header.body_bytes);
  return request ? (part.*act)(session, header, *request)
                 : replies_.refuse(session, header, "the body does not parse");
}

bool Node::dispatch(Session& session, const Header& header, const uint8_t* body) {
  const auto by = [&](auto& part, auto act) { return with(session, header, body, part, act); };
  switch (header.op) {
    case Op::kHello: return by(*this, &Node::hello);
    case Op::kRegister: return by(*this, &Node::register_);
    case Op::kManifests: return by(*this, &Node::manifests);
    case Op::kMatch: return by(reads_, &Reads::match);
    case Op::kHeld: return by(reads_, &Reads::held);
    case Op::kReserve: return by(writes_, &Writes::reserve);
    case Op::kCommit: return by(writes_, &Writes::commit);
    case Op::kAbort: return by(writes_, &Writes::abort);
    case Op::kPut: return by(writes_, &Writes::put);
    case Op::kAcquire: return by(reads_, &Reads::acquire);
    case Op::kRelease: return by(reads_, &Reads::release);
    case Op::kGet: return by(reads_, &Reads::get);
    case Op::kWait: {
      const bool go_on = by(landings_, &Landings::wait);
      take_posts();  // clients that post see now that some request waits
      return go_on;
    }
    case Op::kCancel: return by(landings_, &Landings::cancel);
    case Op::kDelete: return by(*this, &Node::delete_);
    case Op::kPurge: return by(*this, &Node::purge);
    case Op::kStats: return by(*this, &Node::stats_);
    case Op::kLend: return by(local_, &LocalPeers::lend);
    case Op::kAttach: return by(attachments_, &Attachments::attach);
  }
  return replies_.refuse(session, header, "unknown op");
}

bool Node::handle(Session& session, const Header& header, const uint8_t* body) {
  const auto begun = std::chrono::steady_clock::now();
  session.active_at = state_.now;
  // A block that the client knows to be there may have been posted only.
  take_posts();
  const std::unique_ptr<Unfinished> before = std::move(session.unfinished);
  const bool go_on = before != nullptr ? in_turns(session, std::move(before->next))
                     : session.greeted || header.op == Op::kHello
                         ? dispatch(session, header, body)
                         : replies_.refuse(session, header, "the first request must be HELLO");
  auto spent = std::chrono::steady_clock::now() - begun;
  if (before != nullptr) spent += before->spent;
  // A PUT is counted when its payload has come.
  if (session.unfinished != nullptr) session.unfinished->spent = spent;
  else if (session.put != nullptr) session.put->add_time(spent);
  else count_time(header.op, spent);
  return go_on;
}

std::optional<uint32_t> Node::admit(std::string_view token) {
  const std::optional<uint32_t> tenant = state_.options.tenants.find(token);
  if (!tenant) ++state_.counters.unauthorized;
  return tenant;
}

std::optional<std::vector<uint64_t>> Node::follow_tokens(
    const std::vector<TenantOptions>& tenants) {
  const std::optional<std::vector<uint32_t>> changed = state_.options.tenants.follow(tenants);
  if (!changed) return std::nullopt;
  std::vector<uint64_t> ending;
  for (const auto& [id, session] : state_.sessions)
    if (session->greeted && std::ranges::binary_search(*changed, session->tenant))
      ending.push_back(id);
  return ending;
}

void Node::read_notes() {
  take_posts();
  local_.count_uses();
  state_.table.recheck_kept();
}

void Node::clear_up() {
  state_.leases.clear_up(state_.turn);
  // What the host has put may have been posted only.
  if (!tier_asks_.is_clear()) take_posts();
  tier_asks_.go_on();
  landings_.go_on();
}

std::optional<TimePoint> Node::next_deadline() const {
  std::optional<TimePoint> next = landings_.next_deadline();
  for (const auto& one : {promotion_.next_deadline(), tier_asks_.next_deadline()})
    if (one && (!next || *one < *next)) next = one;
  return next;
}

const std::string* Node::document(std::string_view tenant, const Hash& digest) const {
  for (const Manifest& manifest : state_.registry.manifests())
    if (manifest.digest == digest && state_.options.tenants.name(manifest.tenant) == tenant)
      return &manifest.doc;
  return nullptr;
}

Purge Node::begin_purge(std::optional<uint32_t> tenant) {
  take_posts();
  return Purge(state_, tenant);
}

void Node::end_hopeless_waits() {
  // Asked before the posts are taken: a client that has ended its posting by now has posted all.
  const bool hopeless = std::ranges::none_of(state_.sessions, [this](const auto& each) {
    const Session& session = *each.second;
    return session.put != nullptr || !session.reservations.empty() || local_.posting(session.id);
  });
  take_posts();
  if (hopeless) landings_.end_all();
}

bool Node::holds_nothing(const Session& session) const {
  return session.idle() && state_.leases.blocks_of(session.id) == 0 && !local_.busy(session.id);
}

std::vector<uint64_t> Node::idle_sessions() const {
  std::vector<uint64_t> idle;
  for (const auto& [id, session] : state_.sessions)
    if (holds_nothing(*session)) idle.push_back(id);
  return idle;
}

std::optional<uint64_t> Node::spare_session(std::chrono::duration<double> idle) const {
  std::optional<uint64_t> spare;
  std::pair<bool, TimePoint> best{true, TimePoint::max()};
  for (const auto& [id, session] : state_.sessions) {
    const std::pair<bool, TimePoint> rank{!session->engines.empty(), session->active_at};
    if (session->greeted && !session->reads_pool() && rank < best &&
        state_.now - session->active_at >= idle && holds_nothing(*session))
      best = rank, spare = id;
  }
  return spare;
}

}  // namespace kv
