// The index of the disk in a form that survives `kill -9` and torn writes: an append-only file of
// records (disk/journal/records.h) beside the data file. They say which part of which block is in
// which extent, and its CRC32C.
//
// ORDER. What makes a block durable, and never wrong:
//   1. The extent is written, and synced (DiskOp::kSync), before put() is called.
//   2. put(): the record is appended. When durable() has reached its sequence the block is found
//      again after any crash.
//   3. remove(): when durable() has reached ITS sequence the extent may be written again. Before
//      that, a crash would restore a record of bytes that have been overwritten.
//
// The lock on the data file protects the journal too.
//
// Only open() and the destructor block: records are collected in memory, and a thread of the
// journal writes and syncs those collected during its last write (group commit). One thread calls
// all of it.
#pragma once

#include <memory>
#include <unordered_set>

#include "disk/journal/names.h"
#include "disk/journal/records.h"
#include "wire/wire.h"

namespace kv {

// The records of one journal file that are yet to be written. Defines specs and parts in front of
// the first record that needs them.
struct JournalStream {
  uint32_t seed = 0;
  std::string collected;
  std::unordered_set<uint32_t> specs;  // defined in this file
  std::unordered_set<uint32_t> parts;

  // Begins a file, with an id of its own.
  void begin(const DiskGeometry& geometry);
  // The entry's spec and part are in `names`.
  void put(const DiskEntry& entry, const DiskNames& names);
  void remove(const DiskRemoval& removal);
};

class JournalFile;
class JournalFiles;
class JournalThread;
enum class JournalKind;
struct JournalResult;

struct JournalSummary {
  // Why the index starts empty although there was a file; "" if it does not.
  std::string discarded;
  uint64_t records = 0;     // valid ones
  uint64_t good_bytes = 0;  // of the file, in valid records
  uint64_t torn_bytes = 0;  // after them: cut off
  uint64_t overlapped = 0;  // entries dropped because a later one has their extent
};

struct JournalOptions {
  std::string path;
  DiskGeometry geometry;
  // A compaction is due when dead records have so many bytes, and more than the live ones.
  uint64_t least_dead_bytes = 4u << 20;
};

class DiskJournal {
 public:
  static constexpr uint64_t kMaxBacklogBytes = 16u << 20;

  // `files`: null for the real ones.
  explicit DiskJournal(JournalOptions options, std::unique_ptr<JournalFiles> files = nullptr);
  // Writes and syncs the collected records, then ends the thread.
  ~DiskJournal();
  DiskJournal(const DiskJournal&) = delete;
  DiskJournal& operator=(const DiskJournal&) = delete;

  // Reads the journal, or makes one; cuts off a torn end, and starts the thread. Replaces a journal
  // of another data file (another DiskGeometry), or a file of another kind. 0 or an errno.
  int open(DiskContents& found, JournalSummary& summary);

  // The number of a tenant's spec, or of a part of it, in records. 0 at a limit of DiskNames, for a
  // name that is too long, or for a part larger than the data file. Numbers never change while this
  // lives; those that open() found are kept.
  uint32_t spec_number(std::string_view tenant, const wire::Hash& digest);
  uint32_t part_number(uint32_t spec, const wire::Hash& digest, uint64_t bytes);

  // Records that a part of a block is in an extent, which has been written and synced; replaces an
  // earlier record of that part. Sets entry.sequence. Returns the sequence to wait for; 0 (nothing
  // recorded): the journal has failed, kMaxBacklogBytes wait to be written, or an invalid entry.
  uint64_t put(DiskEntry entry);
  // Records that a part of a block, or all of them, is no longer on the disk. Returns the sequence
  // to wait for. Never 0: on a journal that has failed, it is reached after a compaction.
  uint64_t remove(uint32_t spec, const wire::Hash& hash, std::optional<uint32_t> part);

  // Writes the collected records, once for a batch; if a write is in flight they follow by
  // themselves.
  void flush();
  // Readable (EPOLLIN) when on_completion() has something to do. Owned by this object.
  int completion_fd() const;
  // Handles completed writes: durable() and error() may change.
  void on_completion();

  // Every record up to this sequence survives a crash.
  uint64_t durable() const { return durable_; }
  uint64_t appended() const { return appended_; }  // the last assigned sequence
  // The errno of a failed write, or 0. After a failure nothing becomes durable until a compaction
  // has succeeded: a file system that failed to sync may have dropped bytes.
  int error() const { return error_; }
  // Collected and not durable yet.
  uint64_t backlog_bytes() const;
  uint64_t file_bytes() const { return file_bytes_; }

  // COMPACTION: a new journal beside the old one with the live entries only, synced and renamed
  // over it. Meanwhile the journal is used; a crash leaves the old or the new one, whole. The owner
  // gives it all live entries, a bounded slice in each turn of its loop:
  //     if (compaction_due(n)) begin_compaction();  snapshot(entry)...;  end_snapshot();
  // An entry is live after put(), durable or not, until remove() or a later put(). Entries put
  // after begin_compaction() may be given or left out. If a compaction fails the old journal goes
  // on: compacting() is false then, and the rest of the snapshot is ignored.
  bool compaction_due(uint64_t live_entries) const;
  bool compacting() const { return phase_ != Phase::kIdle; }
  // Bytes of the snapshot that wait to be written: the owner pauses while they are many.
  uint64_t snapshot_backlog_bytes() const;
  // False if one is running. After a failure of the journal it is the remedy.
  bool begin_compaction();
  // A live entry, from put() or open(), with its sequence.
  void snapshot(const DiskEntry& entry);
  void end_snapshot();
  int compaction_error() const { return compaction_error_; }  // of the last one that ended
  uint64_t compactions() const { return compactions_; }       // that succeeded

 private:
  enum class Phase { kIdle, kCopying, kSwitching };  // of a compaction

  int recover(JournalFile& file, DiskContents& found, JournalSummary& summary, bool& fresh);
  int replace();
  bool is_sound(const DiskEntry& entry) const;
  void await();
  void fail(int error);
  void on_appended(const JournalResult& result);
  void post_new(JournalKind kind);
  void on_compacted(const JournalResult& result);
  void end_compaction(int error);

  JournalOptions options_;
  std::unique_ptr<JournalThread> thread_;
  bool open_ = false;
  DiskNames names_;
  JournalStream journal_;
  bool writing_ = false;  // an append is in flight
  uint64_t writing_bytes_ = 0;
  uint64_t appended_ = 0;
  uint64_t durable_ = 0;
  uint64_t file_bytes_ = 0;
  int error_ = 0;

  Phase phase_ = Phase::kIdle;
  uint64_t round_ = 0;
  JournalStream new_journal_;
  uint64_t new_bytes_ = 0;      // of the new file, posted
  uint64_t copying_bytes_ = 0;  // posted and not written yet
  uint64_t not_before_bytes_ = 0;
  uint64_t compactions_ = 0;
  int compaction_error_ = 0;
};

}  // namespace kv
