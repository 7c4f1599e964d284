// Leases: runs of pinned blocks, each bound to a connection.
#pragma once

#include <map>

#include "base/turn.h"
#include "table/table.h"

namespace kv {

class Leases {
 public:
  explicit Leases(Table& table) : table_(table) {}

  // Begins a lease of `session` with these blocks. The id is never 0 and never used again.
  uint64_t acquire(uint64_t session, const std::vector<Block*>& blocks = {});
  // Pins one more block under a lease of `session`.
  void add(uint64_t session, uint64_t lease_id, Block& block);
  bool has(uint64_t session, uint64_t lease_id) const {
    return leases_.contains({session, lease_id});
  }
  // Unpins blocks of a lease for as long as the turn lasts. True: it has ended, or there is none.
  bool release(uint64_t session, uint64_t lease_id, Turn& turn);
  // The same at once. False: `session` has no such lease.
  bool release(uint64_t session, uint64_t lease_id);
  // Ends all leases of a session. What the turn does not unpin is left to clear_up().
  void drop_session(uint64_t session, Turn turn = Turn::endless());
  void clear_up(Turn& turn);
  bool is_clear() const { return dropped_.empty(); }

  size_t size() const { return leases_.size(); }
  uint64_t blocks_of(uint64_t session) const;
  uint64_t blocks() const { return blocks_; }

 private:
  using Blocks = std::vector<Block*>;

  bool unpin(Blocks& blocks, Turn& turn);
  void count_down(uint64_t session, uint64_t blocks);

  Table& table_;
  uint64_t last_id_ = 0;
  uint64_t blocks_ = 0;                                     // pins by leases
  std::map<std::pair<uint64_t, uint64_t>, Blocks> leases_;  // by session and id
  std::unordered_map<uint64_t, uint64_t> blocks_by_session_;
  std::vector<uint64_t> dropped_;  // sessions
};

}  // namespace kv
