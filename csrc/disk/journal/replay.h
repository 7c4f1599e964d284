// Reads a journal of the SSD tier: bytes that a crash may have damaged, or that may be anything.
#pragma once

#include "disk/journal/names.h"
#include "disk/journal/records.h"
#include "table/table.h"

namespace kv {

// Takes a journal's bytes in order and collects their contents, up to the first record that is torn
// or invalid. Trusts no length; its memory is bounded by the valid records.
//
// Invariants: those of DiskContents, after every record. If the extents of two puts overlap, the
// later one is valid: its extent was assigned only after the earlier block had been removed.
class DiskReplay {
 public:
  explicit DiskReplay(const DiskGeometry& geometry) : geometry_(geometry) {}

  enum class State { kHeader, kRecords, kNoJournal, kOtherGeometry, kEnded };
  State state() const { return state_; }
  // Takes the next bytes, as many as are whole records; returns how many. The rest is to be given
  // again with more bytes after it; if there are none, the rest is torn.
  size_t feed(std::string_view bytes);

  const JournalHeader& header() const { return header_; }
  uint64_t records() const { return records_; }
  uint64_t overlapped() const { return overlapped_; }
  const DiskNames& names() const { return names_; }
  // May be moved out when all is read.
  DiskContents& contents() { return contents_; }

 private:
  bool apply(const Record& record);
  bool put(DiskEntry entry);
  bool remove(const DiskRemoval& removal);
  void forget(const BlockKey& key, std::optional<uint32_t> part);
  void forget_overlapped(uint64_t begin, uint64_t end);
  void see(uint64_t sequence);

  DiskGeometry geometry_;
  State state_ = State::kHeader;
  JournalHeader header_;
  uint32_t seed_ = 0;
  uint64_t records_ = 0;
  uint64_t overlapped_ = 0;
  DiskNames names_;
  DiskContents contents_;
  // Offsets of the parts of a block.
  std::unordered_multimap<BlockKey, uint64_t, BlockKeyHash> offsets_;
};

}  // namespace kv
