// The blocks in a pool, their parts, and what keeps them there. Knows neither sockets nor bytes.
#pragma once

#include <functional>
#include <unordered_map>

#include "memory/directory.h"
#include "memory/slab.h"
#include "table/chain_forest.h"
#include "table/eviction/policy.h"
#include "table/quotas.h"
#include "wire/keys.h"
#include "wire/wire.h"

namespace kv {

using wire::BlockStatus;

struct Part {
  uint32_t part_id = 0;
  uint32_t crc = 0;
  uint64_t writer = 0;  // session that has it reserved; 0 = committed
  Slot slot;
  uint64_t sequence = 0;  // of its record in the journal; 0: it has none
  bool committed() const { return writer == 0; }
};

struct Block : EvictionMark {
  BlockKey key;
  std::optional<BlockKey> parent;
  std::vector<Part> parts;  // by part_id
  uint32_t children = 0;    // resident blocks whose parent this is
  uint32_t reserved = 0;    // parts that are being written
  uint32_t pins = 0;        // leases and sends: its slots stay
  bool resident = false;    // in the table; else it waits for its last unpin
  bool evictable = false;
  bool holds = false;  // pinned or being written; kept only if tenants have limits
  std::unique_ptr<ChainForest::Node> place;  // in its chain, while it is resident
  uint32_t tenant = 0;                       // owner of its spec
  EvictionPolicy* policy = nullptr;          // of the tenant's share

  Part* find(uint32_t part_id);
};

struct TableCounts {
  uint64_t reserved_blocks = 0;  // parts being written
  uint64_t pinned_blocks = 0;
  uint64_t evictions = 0;
};

// Keeps a record of the table's blocks elsewhere: it is called when blocks leave.
class TableObserver {
 public:
  virtual ~TableObserver() = default;
  // The block is out of the table; another may get its name. All its parts (one or more) are
  // committed.
  virtual void on_leave(const Block& block) = 0;
  // Its last pin is gone. The observer owns its slots now and releases them when they may be used.
  virtual void on_free(const Block& block) = 0;
};

// The parts a manifest needs, ascending.
using PartIds = std::vector<uint32_t>;

// Blocks with their parts in slots of a slab. Not thread-safe; one loop owns it.
//
// Invariants: a part is found by readers only after commit; a (block, part) is reserved by at most
// one session; a slot is released exactly once, and never while a pin or a writer is on it; no
// block is its own ancestor, whatever parents clients send: there is always a leaf to evict.
class Table {
 public:
  // A block belongs to the tenant that owns its spec (Quotas::own). With an observer, reserve()
  // evicts nothing: slots come back only later, and the owner evicts ahead with evict().
  Table(Slab& slab, Quotas quotas, TableObserver* observer = nullptr);

  // Committed parts are published in `directory` until just before their slots may be reused.
  void publish_in(Directory& directory) { directory_ = &directory; }
  // Called before a victim is searched for: the last chance to touch() blocks that were used.
  void before_eviction(std::function<void()> act) { before_eviction_ = std::move(act); }
  // `read_in_place` returns whether a client reads a block in place without a pin of this table:
  // the block is pinned as long as it does. Called when the block has just left the directory.
  void keep_while(std::function<bool(const Block&)> read_in_place) {
    read_in_place_ = std::move(read_in_place);
  }
  // `changed` is called when a part of a block has been committed, and when a block has left.
  void watch(std::function<void(const BlockKey&)> changed) { changed_ = std::move(changed); }
  // Unpins the blocks that no client reads in place any more.
  void recheck_kept();

  struct Reserved {
    BlockStatus status = BlockStatus::kNoSpace;
    Slot slot;
  };
  // GRANTED with a slot for `session` to fill, EXISTS, BUSY, or NO_SPACE if eviction does not help
  // or the block's tenant would hold more than it may. The slot is in `region` of the slab if that
  // has room, else in another one; only then is anything evicted.
  Reserved reserve(const BlockKey& key, const std::optional<BlockKey>& parent, uint32_t part_id,
                   uint64_t bytes, uint64_t session, uint32_t region = Slab::kAnyRegion);
  // OK; EXISTS if an adopted part has taken its place, which gives the slot back; GONE if `session`
  // has no such reservation of that generation.
  BlockStatus commit(const BlockKey& key, uint32_t part_id, uint64_t session, uint32_t generation,
                     uint32_t crc);
  // Ends a reservation. The caller owns its slot and releases it now or when it is safe.
  std::optional<Slot> take_back(const BlockKey& key, uint32_t part_id, uint64_t session,
                                std::optional<uint32_t> generation);
  // Frees a slot that take_back() or lend() returned.
  void release(const Slot& slot);

  // Commits a whole part in a slot from lend(). False, and the slot stays the caller's, if the part
  // exists. If a session has the part reserved, the whole one takes its place; the slot of that
  // reservation stays the session's until commit() or take_back().
  bool adopt(const BlockKey& key, const std::optional<BlockKey>& parent, uint32_t part_id,
             const Slot& slot, uint32_t crc);
  // A slot that belongs to no block yet, for adopt() or release(). As reserve(), it may evict, but
  // neither `next_to` nor the blocks before that in its chain.
  std::optional<Slot> lend(uint32_t tenant, uint64_t bytes, Block* next_to, uint32_t region);

  // Takes over a committed part from before this table was made. False, and the slot stays the
  // caller's, if the table has such a part already.
  bool restore(const BlockKey& key, const std::optional<BlockKey>& parent, const Part& part);
  // Evicts blocks until they had so many bytes or none may be evicted. Returns how many they had.
  uint64_t evict(uint64_t bytes);

  // The resident block, or null.
  Block* find(const BlockKey& key);
  template <class Visit> void for_each(Visit visit) {
    for (const auto& [key, block] : blocks_) visit(*block);
  }
  // The resident block if it has all `parts` committed, else null.
  Block* find_complete(const BlockKey& key, const PartIds& parts);
  // How many leading blocks are complete.
  uint32_t match(uint32_t spec_id, const PartIds& parts, HashSpan hashes);
  void touch(Block& block) { block.policy->on_hit(block); }
  // Seconds on a clock that never goes back.
  void set_now(double now_s) { quotas_.set_now(now_s); }
  void pin(Block& block);
  void unpin(Block& block);

  // Forgets the committed parts of a block; those being written stay. False if there were none.
  bool remove(const BlockKey& key);
  // A pass over all blocks in pieces, while blocks come and go.
  struct Sweep {
    size_t bucket = 0, buckets = 0;
  };
  // Adds some names to `keys`. The calls together return at least every block that is in the table
  // from the first call to the last. False: that was the last call.
  bool next_keys(Sweep& sweep, std::vector<BlockKey>& keys) const;

  uint64_t blocks() const { return blocks_.size(); }
  // The cost of all walks along chains so far.
  uint64_t chain_steps() const { return forest_.steps(); }
  const TableCounts& counts() const { return counts_; }
  Quotas& quotas() { return quotas_; }
  const Quotas& quotas() const { return quotas_; }

 private:
  using BlockMap = std::unordered_map<BlockKey, std::unique_ptr<Block>, BlockKeyHash>;

  Block& insert(const BlockKey& key, const std::optional<BlockKey>& parent);
  Block* hang_on_parent(Block& block);
  void leave_parent(Block& block);
  std::unique_ptr<Block> take_out(Block& block);
  void discard(std::unique_ptr<Block> block);
  void remove_committed(Block& block);
  void add(Block& block, const Part& part);
  std::optional<Slot> take_superseded(const PartKey& key, uint64_t session,
                                      std::optional<uint32_t> generation);
  std::optional<Slot> allocate(uint32_t tenant, uint64_t bytes, uint32_t region);
  uint64_t let_go(Block& victim);
  void refresh(Block& block);
  void publish(const Block& block);
  void tell(const Block& block) const {
    if (changed_) changed_(block.key);
  }
  void withdraw(const Block& block);
  bool keep_if_read(Block& block);
  void drop_if_empty(Block& block);

  // The bytes that cannot be evicted: pinned or being written blocks, and those before them in
  // their chains, which are one tenant's, since they have one spec. Counted only if tenants have
  // limits.
  uint64_t bytes_of(const std::vector<Part>& parts) const;
  void settle_hold(Block& block);
  void grow(Block& block, uint64_t bytes);

  // A block that is not resident but has resident children.
  struct Absent {
    uint32_t children = 0;
    std::unique_ptr<ChainForest::Node> place;
  };

  Slab& slab_;
  Quotas quotas_;
  Directory* directory_ = nullptr;
  std::function<void()> before_eviction_;
  std::function<bool(const Block&)> read_in_place_;
  std::function<void(const BlockKey&)> changed_;
  std::vector<Block*> kept_;  // pinned because of read_in_place_
  TableObserver* observer_ = nullptr;
  BlockMap blocks_;
  std::unordered_map<BlockKey, Absent, BlockKeyHash> absent_;  // those that have children
  ChainForest forest_;  // of the places of all blocks, resident and absent
  // Reservations whose place an adopted part has taken before they ended.
  std::unordered_multimap<PartKey, Part, PartKeyHash> superseded_;
  // Taken out of the table while pinned; freed by the last unpin().
  std::unordered_map<Block*, std::unique_ptr<Block>> leaving_;
  TableCounts counts_;
};

}  // namespace kv
