// Which blocks are on the disk and in which extents: a table and a slab of their own, and the
// journal from which they are restored after a restart. Moves no bytes.
#pragma once

#include <deque>

#include "disk/journal/journal.h"
#include "memory/slab.h"
#include "table/table.h"

namespace kv {

// The order that makes it safe: an extent is written and synced before record(); after the DELETE
// of its block it is not used until the DELETE is durable.
class DiskIndex final : public TableObserver {
 public:
  // `journal` has been opened and outlives this.
  DiskIndex(const DiskGeometry& geometry, std::string_view eviction, DiskJournal& journal);

  // Assigns numbers of the journal to ids of this run of the node. False at the journal's limits:
  // then nothing of that spec or part is written to the disk.
  bool name_spec(uint32_t spec_id, std::string_view tenant, const Hash& digest);
  bool name_part(uint32_t spec_id, uint32_t part_id, const Hash& digest, uint64_t bytes);
  // Takes over the contents of the journal, with its numbers as ids. Returns how many parts.
  uint64_t restore(const DiskContents& found);

  // Where a part is; null if it is not on the disk.
  const Part* find(const BlockKey& key, uint32_t part_id);
  Block* find_block(const BlockKey& key) { return table_.find(key); }
  void touch(const BlockKey& key);
  // `left` is called when a block is not on the disk any more.
  void when_left(std::function<void(const BlockKey&)> left) { left_ = std::move(left); }
  void pin(Block& block) { table_.pin(block); }
  void unpin(Block& block) { table_.unpin(block); }

  enum class Room {
    kGranted,  // an extent to write
    kExists,
    kBusy,   // being written
    kLater,  // extents become free when the journal has advanced
    kNever,
  };
  Room reserve(const BlockKey& key, const std::optional<BlockKey>& parent, const Part& part,
               Slot& extent);
  // The extent has been written and synced. Returns the sequence at which its record is durable; 0:
  // the journal takes no record now, and the extent stays reserved.
  uint64_t record(const BlockKey& key, uint32_t part_id, uint32_t generation, uint32_t crc);
  bool may_record() const;
  // The part will not be recorded; frees its extent.
  void give_up(const BlockKey& key, uint32_t part_id);

  // Forgets the recorded parts of a block. False if there were none.
  bool remove(const BlockKey& key) { return table_.remove(key); }
  bool next_keys(Table::Sweep& sweep, std::vector<BlockKey>& keys) const {
    return table_.next_keys(sweep, keys);
  }

  // The journal's durable() may have moved.
  void advance();
  // Goes on with a compaction of the journal, a slice of live entries at each call. With `begin` a
  // new one may start, if it is due or the journal has failed. True: there is more to give at once.
  bool compact(bool begin);
  void set_now(double now_s) { table_.set_now(now_s); }

  uint64_t blocks() const { return table_.blocks(); }
  uint64_t parts() const { return parts_; }
  // Parts with a record that is not durable yet.
  uint64_t undurable() const { return undurable_.size(); }
  uint64_t evictions() const { return table_.counts().evictions; }
  uint64_t bytes() const { return slab_.pool_bytes(); }
  uint64_t used_bytes() const { return slab_.pool_bytes() - slab_.free_bytes(); }
  // An extent of one granule at the end of the file that no block uses.
  const Slot& scratch() const { return scratch_; }

  void on_leave(const Block& block) override;
  void on_free(const Block& block) override;

 private:
  static constexpr uint64_t kWriter = 1;
  struct Freed {
    uint64_t sequence;
    Slot extent;
  };
  bool restore_one(const DiskEntry& entry);
  bool named(uint32_t spec_id, uint32_t part_id) const;
  Room make_room(const std::optional<BlockKey>& parent, uint64_t bytes);
  void evict_ahead();
  std::optional<DiskEntry> entry_of(const Block& block, const Part& part) const;
  uint64_t extent_bytes(uint64_t bytes) const { return geometry_.extent_bytes(bytes); }

  DiskGeometry geometry_;
  DiskJournal& journal_;
  Slab slab_;
  Slot scratch_;
  Table table_;
  std::unordered_map<uint32_t, uint32_t> spec_numbers_, part_numbers_;  // by id
  std::deque<Freed> freed_;  // until the journal has reached their sequence
  uint64_t freed_bytes_ = 0;
  std::deque<uint64_t> undurable_;  // sequences of records
  uint64_t parts_ = 0;
  uint64_t evicted_in_vain_ = 0;  // bytes, since an extent was granted
  std::vector<BlockKey> to_compact_;
  bool compacting_ = false;
  std::function<void(const BlockKey&)> left_;
};

}  // namespace kv
