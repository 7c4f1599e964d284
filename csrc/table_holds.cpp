// What cannot go, counted where tenants have limits: what is pinned or being written, and all that
// comes before it in its chain.
#include "table.h"

namespace kv {

uint64_t Table::bytes_of(const std::vector<Part>& parts) const {
  uint64_t bytes = 0;
  for (const Part& part : parts) bytes += slab_.rounded(part.slot.bytes);
  return bytes;
}

// Goes up the chain as far as something changes: once in all for a run that is pinned.
void Table::settle_held(Block& from) {
  for (Block* block = &from; block != nullptr;) {
    const bool held = block->pins != 0 || block->reserved != 0 || block->held_children != 0;
    if (held == block->held) return;
    block->held = held;
    if (held) quotas_.hold(block->tenant, bytes_of(block->parts));
    else quotas_.let_go(block->tenant, bytes_of(block->parts));
    block = tell_parent(*block, held);
  }
}

// The parent, if it is resident.
Block* Table::tell_parent(const Block& child, bool held) {
  if (!child.parent) return nullptr;
  const auto above = blocks_.find(*child.parent);
  uint32_t& count = above == blocks_.end() ? orphans_.find(*child.parent)->second.held
                                           : above->second->held_children;
  held ? ++count : --count;
  return above == blocks_.end() ? nullptr : above->second.get();
}

// Of a block that has left the table: what came before it may go. It holds its own bytes until they
// are released.
void Table::forget_held(Block& block) {
  block.held_children = 0;
  if (Block* above = tell_parent(block, false)) settle_held(*above);
}

// It counts as the tenant's from now on.
Slot Table::take(uint32_t tenant, Slot spare) {
  quotas_.took(tenant, slab_.rounded(spare.bytes));
  spare.tenant = tenant;
  return spare;
}

}  // namespace kv
