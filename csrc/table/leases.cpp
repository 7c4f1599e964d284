#include "table/leases.h"

namespace kv {

uint64_t Leases::acquire(uint64_t session, const std::vector<Block*>& blocks) {
  const uint64_t id = ++last_id_;
  leases_[{session, id}].reserve(blocks.size());
  for (Block* block : blocks) add(session, id, *block);
  return id;
}

void Leases::add(uint64_t session, uint64_t lease_id, Block& block) {
  table_.pin(block);
  leases_.find({session, lease_id})->second.push_back(&block);
  ++blocks_;
  ++blocks_by_session_[session];
}

// From the end, so that the rest is the beginning of a chain.
bool Leases::unpin(Blocks& blocks, Turn& turn) {
  for (; !blocks.empty() && !turn.over(); turn.spend(1)) {
    table_.unpin(*blocks.back());
    blocks.pop_back();
    --blocks_;
  }
  return blocks.empty();
}

void Leases::count_down(uint64_t session, uint64_t blocks) {
  const auto held = blocks_by_session_.find(session);
  if (held != blocks_by_session_.end() && (held->second -= blocks) == 0)
    blocks_by_session_.erase(held);
}

bool Leases::release(uint64_t session, uint64_t lease_id, Turn& turn) {
  const auto found = leases_.find({session, lease_id});
  if (found == leases_.end()) return true;
  const size_t before = found->second.size();
  const bool ended = unpin(found->second, turn);
  count_down(session, before - found->second.size());
  if (ended) leases_.erase(found);
  return ended;
}

bool Leases::release(uint64_t session, uint64_t lease_id) {
  Turn turn = Turn::endless();
  return has(session, lease_id) && release(session, lease_id, turn);
}

void Leases::drop_session(uint64_t session, Turn turn) {
  blocks_by_session_.erase(session);
  dropped_.push_back(session);
  clear_up(turn);
}

void Leases::clear_up(Turn& turn) {
  while (!dropped_.empty() && !turn.over()) {
    const uint64_t session = dropped_.back();
    const auto lease = leases_.lower_bound({session, 0});
    if (lease == leases_.end() || lease->first.first != session) dropped_.pop_back();
    else if (unpin(lease->second, turn)) leases_.erase(lease);
  }
}

uint64_t Leases::blocks_of(uint64_t session) const {
  const auto found = blocks_by_session_.find(session);
  return found == blocks_by_session_.end() ? 0 : found->second;
}

}  // namespace kv
