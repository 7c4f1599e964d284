#include "node/local_peers.h"

namespace kv {

using wire::Header;
using wire::Status;

LocalPeers::LocalPeers(NodeState& state, Replies& replies, Lookup& lookup, Writes& writes)
    : state_(state), replies_(replies), lookup_(lookup), writes_(writes),
      most_lent_bytes_(state.options.lend_bytes.value_or(
          std::min(kMaxLendBytes, state.slab.pool_bytes() / kLendShare))) {}

void LocalPeers::publish_in(const Pool& directory) {
  directory_memory_ = &directory;
  state_.table.publish_in(directory_.emplace(directory.data(), directory.size()));
  state_.table.before_eviction([this] { count_uses(); });
  state_.table.keep_while([this](const Block& block) { return read_in_place(block); });
}

// The directory and the notes, or neither: to eviction, blocks with unlogged reads look unused.
uint64_t LocalPeers::share(Session& session, Outgoing& reply) {
  if (!directory_) return 0;
  auto made = std::make_unique<Peer>(session);
  if (made->memory.open(NotesLayout::kBytes, false) != 0) return 0;
  reply.owned_fd = made->memory.take_writable_file();
  reply.fds.insert(reply.fds.end(), {directory_memory_->readable_fd(), reply.owned_fd.get()});
  uint8_t* const notes = made->memory.data();
  made->uses.emplace(notes + NotesLayout::kUses);
  made->pins.emplace(notes + NotesLayout::kPins);
  if (session.access == wire::PoolAccess::kWrite) {
    made->posts.emplace(notes + NotesLayout::kPuts);
    if (calling_) made->posts->set(PutRing::State::kCalling);
    writers_.push_back(made.get());
  }
  peers_.emplace(session.id, std::move(made));
  return directory_memory_->size();
}

std::vector<Slot> LocalPeers::end(const Session& session) {
  const auto found = peers_.find(session.id);
  if (found == peers_.end()) return {};
  Peer& peer = *found->second;
  count_uses(peer);
  if (peer.posts) {
    peer.posts->set(PutRing::State::kClosed);
    take_posts(peer);
    std::erase(writers_, &peer);
  }
  for (const Slot& slot : peer.lent) lent_bytes_ -= state_.slab.rounded(slot.bytes);
  std::vector<Slot> slots = std::move(peer.lent);
  peers_.erase(found);
  return slots;
}

const LocalPeers::Peer* LocalPeers::find(uint64_t session) const {
  const auto found = peers_.find(session);
  return found == peers_.end() ? nullptr : found->second.get();
}

bool LocalPeers::posting(uint64_t session) const {
  const Peer* const peer = find(session);
  return peer != nullptr && peer->posts && peer->posts->writing();
}

bool LocalPeers::busy(uint64_t session) const {
  const Peer* const peer = find(session);
  return peer != nullptr && (peer->pins->in_use() || posting(session));
}

uint64_t LocalPeers::sum(uint64_t (PinBoard::*count)() const) const {
  uint64_t sum = 0;
  for (const auto& [id, peer] : peers_) sum += ((*peer->pins).*count)();
  return sum;
}

uint8_t* LocalPeers::notes(uint64_t session) {
  const Peer* const peer = find(session);
  return peer == nullptr ? nullptr : peer->memory.data();
}

// What was posted before the writers saw the new state is taken now.
void LocalPeers::take_posts(bool awaited) {
  if (std::exchange(calling_, awaited) != awaited)
    for (Peer* peer : writers_)
      peer->posts->set(awaited ? PutRing::State::kCalling : PutRing::State::kQuiet);
  for (Peer* peer : writers_) take_posts(*peer);
}

void LocalPeers::take_posts(Peer& peer) {
  peer.posts->take([&](const Post& post) { take_post(peer, post); });
}

void LocalPeers::take_post(Peer& peer, const Post& post) {
  const auto lent = std::ranges::find_if(peer.lent, [&post](const Slot& slot) {
    return slot.offset == post.offset && slot.generation == post.generation;
  });
  Posted became = Posted::kRefused;
  if (lent != peer.lent.end()) {
    const Slot slot = *lent;
    peer.lent.erase(lent);
    lent_bytes_ -= state_.slab.rounded(slot.bytes);
    state_.holds.gave(peer.session.client, slot.bytes);
    peer.session.active_at = state_.now;
    became = adopt(peer.session, post, slot);
    if (became != Posted::kStored) state_.table.release(slot);
  }
  ++state_.counters.posts[became];
}

Posted LocalPeers::adopt(const Session& session, const Post& post, const Slot& slot) {
  const Manifest* manifest = state_.registry.find(session.tenant, post.manifest_id);
  if (manifest == nullptr || post.part >= manifest->parts.size()) return Posted::kRefused;
  const ManifestPart& part = manifest->parts[post.part];
  if (part.bytes != slot.bytes || !may_hang(post.hash, post.parent)) return Posted::kRefused;
  const PartKey key{{manifest->spec_id, post.hash}, part.part_id};
  if (!state_.table.adopt(key.block, parent_of(manifest->spec_id, post.parent), part.part_id, slot,
                          post.crc))
    return Posted::kExists;
  writes_.committed(key, slot.bytes, Transport::kShm);
  return Posted::kStored;
}

bool LocalPeers::lend(Session& session, const Header& header, const wire::LendRequest& request) {
  if (session.access != wire::PoolAccess::kWrite)
    return replies_.fail(session, header, Status::kNotAllowed, "LEND needs a writable pool");
  const Manifest* manifest = replies_.manifest_or_fail(session, header, request.manifest_id);
  if (manifest == nullptr) return true;
  if (request.part >= manifest->parts.size())
    return replies_.refuse(session, header, "no such part");
  wire::LendReply answer;
  if (const auto found = peers_.find(session.id); found != peers_.end()) {
    Peer& peer = *found->second;
    const uint64_t bytes = manifest->parts[request.part].bytes;
    if (!peer.lent.empty() && peer.lent.front().bytes != bytes) give_back(peer);
    answer.most = most_lent(bytes);
    lend_more(peer, bytes, answer.most, parent_of(manifest->spec_id, request.parent));
    for (const Slot& slot : peer.lent) {
      answer.offsets.push_back(slot.offset);
      answer.generations.push_back(slot.generation);
    }
  }
  replies_.send(session, header, std::move(answer));
  return true;
}

// How many slots of this size a connection may have lent.
uint32_t LocalPeers::most_lent(uint64_t bytes) const {
  // A lent slot would have to be counted in its tenant's share, and evict from that.
  if (state_.table.quotas().limited()) return 0;
  const uint64_t most = most_lent_bytes_ / state_.slab.rounded(bytes);
  return static_cast<uint32_t>(std::min<uint64_t>(PutRing::kRecords, most));
}

// By its LEND the client has said that it does not write there any more.
void LocalPeers::give_back(Peer& peer) {
  for (const Slot& slot : std::exchange(peer.lent, {})) {
    lent_bytes_ -= state_.slab.rounded(slot.bytes);
    writes_.free_slot(peer.session.writer(), slot);
  }
}

// Up to `most` in all.
void LocalPeers::lend_more(Peer& peer, uint64_t bytes, uint32_t most,
                           const std::optional<BlockKey>& parent) {
  const Session& session = peer.session;
  const uint64_t rounded = state_.slab.rounded(bytes);
  Block* const next_to = parent ? state_.table.find(*parent) : nullptr;
  const uint64_t all =
      std::max(state_.slab.pool_bytes() / kLendShare, most_lent_bytes_) * kLendParts;
  // What ended connections had lent counts for as long as it is fenced.
  while (peer.lent.size() < most && lent_bytes_ + state_.fences.bytes() + rounded <= all &&
         state_.holds.may_take(session.client, bytes)) {
    const auto slot = state_.table.lend(session.tenant, bytes, next_to, session.region);
    if (!slot) return;
    peer.lent.push_back(*slot);
    lent_bytes_ += rounded;
    state_.holds.took(session.client, bytes);
  }
}

void LocalPeers::count_uses() {
  for (const auto& [id, peer] : peers_) count_uses(*peer);
}

void LocalPeers::count_uses(Peer& peer) {
  peer.uses->drain([&](const UseLog::Use& use) { count_use(peer.session, use); });
}

// The entry may name another part by now: then that one is counted.
void LocalPeers::count_use(const Session& session, const UseLog::Use& use) {
  const std::optional<PartKey> key = directory_->at(use.index);
  Block* block = key ? state_.table.find(key->block) : nullptr;
  if (block == nullptr) return;
  state_.table.touch(*block);
  if (use.kind == UseLog::Kind::kKept) return;
  lookup_.count(session, {1, 1, 1}, 1);
  if (use.kind == UseLog::Kind::kRead)
    state_.counters.bytes_out[Transport::kShm] += block->find(key->part_id)->slot.bytes;
}

bool LocalPeers::read_in_place(const Block& block) const {
  return std::ranges::any_of(peers_, [&block](const auto& each) {
    const PinBoard& pins = *each.second->pins;
    return pins.in_use() && std::ranges::any_of(block.parts, [&pins](const Part& part) {
             return pins.pins(part.slot.offset);
           });
  });
}

}  // namespace kv
