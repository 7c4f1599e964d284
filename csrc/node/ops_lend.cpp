// LEND, and what clients write into lent slots without a request.
#include <algorithm>

#include "node/node.h"

namespace kv {

using wire::PoolAccess;
using wire::Status;

void Node::begin_posts(Session& session, void* memory) {
  session.posts.emplace(memory);
  if (calling_) session.posts->set(PutRing::State::kCalling);
  writers_.push_back(&session);
}

// What it had lent is the caller's.
std::vector<Slot> Node::end_posts(Session& session) {
  if (!session.posts) return {};
  session.posts->set(PutRing::State::kClosed);
  take_posts(session);
  std::erase(writers_, &session);
  for (const Slot& slot : session.lent) lent_bytes_ -= slab_.rounded(slot.bytes);
  return std::exchange(session.lent, {});
}

// Tells those who post that somebody waits. What came before they knew is taken now.
void Node::call_writers() {
  if (std::exchange(calling_, true)) return;
  for (Session* session : writers_) session->posts->set(PutRing::State::kCalling);
  take_posts();
}

void Node::take_posts() {
  if (calling_ && waits_.size() == 0) {
    calling_ = false;
    for (Session* session : writers_) session->posts->set(PutRing::State::kQuiet);
  }
  for (Session* session : writers_) take_posts(*session);
}

void Node::take_posts(Session& session) {
  session.posts->take([&](const Post& post) { take_post(session, post); });
}

void Node::take_post(Session& session, const Post& post) {
  const auto lent = std::ranges::find_if(session.lent, [&post](const Slot& slot) {
    return slot.offset == post.offset && slot.generation == post.generation;
  });
  Posted became = Posted::kRefused;
  if (lent != session.lent.end()) {
    const Slot slot = *lent;
    session.lent.erase(lent);
    lent_bytes_ -= slab_.rounded(slot.bytes);
    holds_.gave(session.client, slot.bytes);
    session.heard = now_;
    became = adopt(session, post, slot);
    if (became != Posted::kStored) table_.release(slot);
  }
  ++counters_.posts[became];
}

Posted Node::adopt(const Session& session, const Post& post, const Slot& slot) {
  const Manifest* manifest = registry_.find(session.tenant, post.manifest_id);
  if (manifest == nullptr || post.part >= manifest->parts.size()) return Posted::kRefused;
  const ManifestPart& part = manifest->parts[post.part];
  if (part.bytes != slot.bytes || !may_hang(post.hash, post.parent)) return Posted::kRefused;
  const PartKey key{{manifest->spec_id, post.hash}, part.part_id};
  if (!table_.adopt(key.block, parent_of(manifest->spec_id, post.parent), part.part_id, slot,
                    post.crc))
    return Posted::kExists;
  committed(key, slot.bytes, Transport::kShm);
  return Posted::kStored;
}

// How many slots of this size a connection may have lent.
uint32_t Node::most_lent(uint64_t bytes) const {
  // A victim of each tenant's own would have to be found, and its share be counted.
  if (table_.quotas().limited()) return 0;
  const uint64_t most = most_lent_bytes_ / slab_.rounded(bytes);
  return static_cast<uint32_t>(std::min<uint64_t>(PutRing::kRecords, most));
}

bool Node::lend(Session& session, const Header& header, const wire::LendRequest& request) {
  if (session.access != PoolAccess::kWrite)
    return fail(session, header, Status::kNotAllowed, "LEND needs a writable pool");
  const Manifest* manifest = manifest_or_fail(session, header, request.manifest_id);
  if (manifest == nullptr) return true;
  if (request.part >= manifest->parts.size()) return refuse(session, header, "no such part");
  const uint64_t bytes = manifest->parts[request.part].bytes;
  if (!session.lent.empty() && session.lent.front().bytes != bytes) give_back_lent(session);
  wire::LendReply answer;
  if (session.posts) {
    answer.most = most_lent(bytes);
    lend_slots(session, bytes, answer.most, parent_of(manifest->spec_id, request.parent));
  }
  for (const Slot& slot : session.lent) {
    answer.offsets.push_back(slot.offset);
    answer.generations.push_back(slot.generation);
  }
  reply(session, header, std::move(answer));
  return true;
}

// The client has said that it no longer writes there.
void Node::give_back_lent(Session& session) {
  for (const Slot& slot : std::exchange(session.lent, {})) {
    lent_bytes_ -= slab_.rounded(slot.bytes);
    free_slot(session.writer(), slot);
  }
}

// Up to `count` in all.
void Node::lend_slots(Session& session, uint64_t bytes, uint32_t count,
                      const std::optional<BlockKey>& parent) {
  const uint64_t rounded = slab_.rounded(bytes);
  Block* const next_to = parent ? table_.find(*parent) : nullptr;
  const uint64_t all = std::max(slab_.pool_bytes() / kLendShare, most_lent_bytes_) * kLendParts;
  // What gone clients had lent counts for as long as it is fenced.
  while (session.lent.size() < count && lent_bytes_ + fences_.bytes() + rounded <= all &&
         holds_.may_take(session.client, bytes)) {
    const auto slot = table_.lend(session.tenant, bytes, next_to, session.region);
    if (!slot) return;
    session.lent.push_back(*slot);
    lent_bytes_ += rounded;
    holds_.took(session.client, bytes);
  }
}

}  // namespace kv
