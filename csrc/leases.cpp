#include "leases.h"

namespace kv {

uint64_t Leases::acquire(uint64_t session, std::vector<Block*> blocks) {
  for (Block* block : blocks) table_.pin(*block);
  blocks_ += blocks.size();
  blocks_by_session_[session] += blocks.size();
  leases_.emplace(++last_id_, Lease{session, std::move(blocks)});
  return last_id_;
}

bool Leases::release(uint64_t session, uint64_t lease_id) {
  const auto found = leases_.find(lease_id);
  if (found == leases_.end() || found->second.session != session) return false;
  end(found->second);
  leases_.erase(found);
  return true;
}

void Leases::drop_session(uint64_t session) {
  if (!blocks_by_session_.contains(session)) return;
  std::erase_if(leases_, [&](const auto& entry) {
    if (entry.second.session != session) return false;
    end(entry.second);
    return true;
  });
}

uint64_t Leases::blocks_of(uint64_t session) const {
  const auto found = blocks_by_session_.find(session);
  return found == blocks_by_session_.end() ? 0 : found->second;
}

void Leases::end(const Lease& lease) {
  for (Block* block : lease.blocks) table_.unpin(*block);
  blocks_ -= lease.blocks.size();
  const auto held = blocks_by_session_.find(lease.session);
  if ((held->second -= lease.blocks.size()) == 0) blocks_by_session_.erase(held);
}

}  // namespace kv
