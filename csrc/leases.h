// Promises not to evict: a run of pinned blocks, bound to a connection.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "table.h"

namespace kv {

class Leases {
 public:
  explicit Leases(Table& table) : table_(table) {}

  // Pins the blocks for `session`. The id is never 0 and never used again.
  uint64_t acquire(uint64_t session, std::vector<Block*> blocks);
  // False if `session` holds no such lease (any more).
  bool release(uint64_t session, uint64_t lease_id);
  void drop_session(uint64_t session);

  size_t size() const { return leases_.size(); }
  uint64_t blocks_of(uint64_t session) const;
  uint64_t blocks() const { return blocks_; }

 private:
  struct Lease {
    uint64_t session = 0;
    std::vector<Block*> blocks;
  };
  void end(const Lease& lease);

  Table& table_;
  uint64_t last_id_ = 0;
  uint64_t blocks_ = 0;  // pins by leases
  std::unordered_map<uint64_t, Lease> leases_;
  std::unordered_map<uint64_t, uint64_t> blocks_by_session_;
};

}  // namespace kv
