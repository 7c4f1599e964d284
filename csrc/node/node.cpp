#include "node/node.h"

#include <algorithm>

namespace kv {

using wire::Op;
using wire::Status;

namespace {

Quotas quotas_of(const NodeOptions& options, uint64_t pool_bytes, uint64_t most_pins) {
  const auto make = [name = options.eviction] { return make_eviction_policy(name); };
  if (options.tenants.open()) return Quotas(make());
  return {pool_bytes, options.tenants.quotas(), make, most_pins};
}

std::vector<uint64_t> begins_of(const std::vector<PoolRegion>& regions) {
  std::vector<uint64_t> begins;
  for (const PoolRegion& region : regions) begins.push_back(region.begin);
  return begins;
}

}  // namespace

Node::Node(NodeOptions options, uint8_t* pool, uint64_t pool_bytes, int readable_fd,
           int writable_fd, const Pool* directory)
    : options_(std::move(options)),
      pool_(pool),
      readable_fd_(readable_fd),
      writable_fd_(writable_fd),
      tenant_counts_(options_.tenants.count() + 1),
      slab_(pool_bytes, options_.granule_bytes, begins_of(options_.regions)),
      holds_(slab_, options_.reserve_bytes.value_or(pool_bytes / kReserveShare)),
      table_(slab_, quotas_of(options_, pool_bytes, options_.limits.pins)),
      registry_(options_.tenants.count()),
      waits_([this](uint32_t spec_id, const PartIds& parts, HashSpan hashes) {
        return find(spec_id, parts, hashes);
      }),
      leases_(table_),
      fences_(table_, holds_),
      most_lent_bytes_(
          options_.lend_bytes.value_or(std::min(kMaxLendBytes, pool_bytes / kLendShare))) {
  if (directory == nullptr) return;
  directory_fd_ = directory->readable_fd();
  directory_bytes_ = directory->size();
  table_.publish_in(directory_.emplace(directory->data(), directory->size()));
  table_.before_eviction([this] { count_uses(); });
  table_.keep_while([this](const Block& block) { return read_in_place(block); });
}

// Sessions give back what they hold, and the table then asks who reads in place: all of it must
// still be there, and of the sessions nobody may be asked any more.
Node::~Node() {
  neighbours_.clear();
  writers_.clear();
  sessions_.clear();
}

Session& Node::add_session(File socket, bool local,
                           const std::shared_ptr<const TlsContext>& tls) {
  ++counters_.connections;
  const uint64_t id = ++last_session_;
  strangers_.insert(id);
  auto made = std::make_unique<Session>(id, std::move(socket), local, now_, tls);
  return *sessions_.emplace(id, std::move(made)).first->second;
}

Session* Node::find_session(uint64_t id) {
  const auto found = sessions_.find(id);
  return found == sessions_.end() ? nullptr : found->second.get();
}

std::optional<uint64_t> Node::end_session(uint64_t id) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return std::nullopt;
  // Out of sight first: nothing below may find it.
  const std::unique_ptr<Session> session = std::move(found->second);
  sessions_.erase(found);
  strangers_.erase(id);
  count_uses(*session);
  std::erase(neighbours_, session.get());
  counters_.landings[Landing::kGone] += waits_.drop_session(id);
  const bool in_use = leases_.blocks_of(id) != 0 || !session->reservations.empty() ||
                      !session->expired.empty();
  leases_.drop_session(id, Turn(options_.turn_blocks));
  if (session->greeted) {
    TenantCounts& counts = counts_of(*session);
    --counts.connections;
    counts.waits -= session->waits;
    counts.wait_hashes -= session->wait_hashes;
  }
  if (runs_ != nullptr) runs_->drop_session(id);
  session->put.reset();
  std::vector<Slot> slots = end_posts(*session);
  for (const PartKey& key : session->reservations)
    if (const auto slot = table_.take_back(key.block, key.part_id, id, std::nullopt))
      slots.push_back(*slot);
  for (const auto& [generation, one] : session->expired) slots.push_back(one.slot);
  if (end_attachment(*session, in_use, slots) || slots.empty()) return std::nullopt;
  counters_.fenced += slots.size();
  return fences_.raise(std::move(session->fence), std::move(slots), session->client);
}

template <class Body>
bool Node::with(Session& session, const Header& header, const uint8_t* body,
                bool (Node::*act)(Session&, const Header&, const Body&)) {
  const std::optional<Body> request = wire::decode_body<Body>(body, header.body_bytes);
  return request ? (this->*act)(session, header, *request)
                 : refuse(session, header, "the body does not parse");
}

bool Node::dispatch(Session& session, const Header& header, const uint8_t* body) {
  switch (header.op) {
    case Op::kHello: return with(session, header, body, &Node::hello);
    case Op::kRegister: return with(session, header, body, &Node::register_);
    case Op::kManifests: return with(session, header, body, &Node::manifests);
    case Op::kMatch: return with(session, header, body, &Node::match);
    case Op::kReserve: return with(session, header, body, &Node::reserve);
    case Op::kCommit: return with(session, header, body, &Node::commit);
    case Op::kAbort: return with(session, header, body, &Node::abort);
    case Op::kPut: return with(session, header, body, &Node::put);
    case Op::kAcquire: return with(session, header, body, &Node::acquire);
    case Op::kRelease: return with(session, header, body, &Node::release);
    case Op::kGet: return with(session, header, body, &Node::get);
    case Op::kWait: return with(session, header, body, &Node::wait);
    case Op::kCancel: return with(session, header, body, &Node::cancel);
    case Op::kDelete: return with(session, header, body, &Node::delete_);
    case Op::kPurge: return with(session, header, body, &Node::purge_);
    case Op::kStats: return with(session, header, body, &Node::stats_);
    case Op::kLend: return with(session, header, body, &Node::lend);
    case Op::kAttach: return with(session, header, body, &Node::attach);
  }
  return refuse(session, header, "unknown op");
}

bool Node::handle(Session& session, const Header& header, const uint8_t* body) {
  const auto begun = std::chrono::steady_clock::now();
  session.heard = now_;
  // What the peer knows to be there may be known to us from a post alone.
  take_posts();
  const std::unique_ptr<Unfinished> before = std::move(session.unfinished);
  const bool go_on = before != nullptr ? in_turns(session, std::move(before->next))
                     : session.greeted || header.op == Op::kHello
                         ? dispatch(session, header, body)
                         : refuse(session, header, "the first request must be HELLO");
  auto spent = std::chrono::steady_clock::now() - begun;
  if (before != nullptr) spent += before->spent;
  // A PUT is counted when its payload has come.
  if (session.unfinished != nullptr) session.unfinished->spent = spent;
  else if (session.put != nullptr) session.put->add_time(spent);
  else count_time(header.op, spent);
  return go_on;
}

void Node::queue(Session& session, Outgoing out) {
  session.send(std::move(out), now_);
  touch(session);
}

bool Node::fail(Session& session, const Header& header, Status status, std::string_view why) {
  reply(session, header, wire::ErrorReply{why}, status);
  return true;
}

bool Node::limit(Session& session, const Header& header, std::string_view why) {
  ++counts_of(session).limited;
  return fail(session, header, Status::kLimit, why);
}

bool Node::refuse(Session& session, const Header& header, std::string_view why) {
  refuse_frame(session, header, Status::kBadRequest, why);
  return false;
}

void Node::refuse_frame(Session& session, const Header& header, Status status,
                        std::string_view why) {
  ++counters_.bad_frames;
  reply(session, header, wire::ErrorReply{why}, status);
}

const Manifest* Node::manifest_or_fail(Session& session, const Header& header, uint32_t id) {
  const Manifest* manifest = registry_.find(session.tenant, id);
  if (manifest == nullptr)
    fail(session, header, Status::kUnknownManifest, "no such manifest is registered here");
  return manifest;
}

std::optional<uint32_t> Node::admit(std::string_view token) {
  const std::optional<uint32_t> tenant = options_.tenants.find(token);
  if (!tenant) ++counters_.unauthorized;
  return tenant;
}

std::optional<std::vector<uint64_t>> Node::follow_tokens(
    const std::vector<TenantOptions>& tenants) {
  const std::optional<std::vector<uint32_t>> changed = options_.tenants.follow(tenants);
  if (!changed) return std::nullopt;
  std::vector<uint64_t> ending;
  for (const auto& [id, session] : sessions_)
    if (session->greeted && std::ranges::binary_search(*changed, session->tenant))
      ending.push_back(id);
  return ending;
}

void Node::read_notes() {
  take_posts();
  count_uses();
  table_.recheck_kept();
}

void Node::count_uses() {
  for (Session* session : neighbours_) count_uses(*session);
}

void Node::count_uses(Session& session) {
  if (session.use_log) session.use_log->drain([&](const UseLog::Use& use) { count_use(session, use); });
}

bool Node::read_in_place(const Block& block) const {
  return std::ranges::any_of(neighbours_, [&block](const Session* session) {
    return session->pins->in_use() && std::ranges::any_of(block.parts, [&](const Part& part) {
      return session->pins->pins(part.slot.offset);
    });
  });
}

// An entry may name another part by now: then that one is taken for used.
void Node::count_use(const Session& session, const UseLog::Use& use) {
  const std::optional<PartKey> key = directory_->at(use.index);
  Block* block = key ? table_.find(key->block) : nullptr;
  if (block == nullptr) return;
  table_.touch(*block);
  if (use.kind == UseLog::Kind::kKept) return;
  count_match(session, {1, 1, 1}, 1);
  if (use.kind == UseLog::Kind::kRead) counters_.bytes_out[Transport::kShm] += block->find(key->part_id)->slot.bytes;
}

void Node::clear_up() {
  leases_.clear_up(turn_);
  land_waits();
}

Node::Purge Node::begin_purge(std::optional<uint32_t> tenant) {
  take_posts();
  Purge purge;
  if (tenant) purge.specs_ = registry_.specs_of(*tenant);
  return purge;
}

// Each block goes from both tiers at once. The memory is gone through before the disk and after it: a
// block may have been brought from there meanwhile.
bool Node::go_on(Purge& purge) {
  const int tables = disk_ == nullptr ? 1 : 3;
  std::vector<BlockKey> keys;
  for (; purge.tables_ < tables && !turn_.over(); turn_.spend(1 + keys.size())) {
    keys.clear();
    const bool more = purge.tables_ == 1 ? disk_->next_keys(purge.sweep_, keys)
                                         : table_.next_keys(purge.sweep_, keys);
    for (const BlockKey& key : keys)
      if (!purge.specs_ || purge.specs_->contains(key.spec_id))
        purge.removed_ += forget(key, counters_.purged) ? 1 : 0;
    if (!more) ++purge.tables_, purge.sweep_ = {};
  }
  return purge.tables_ == tables;
}

}  // namespace kv
