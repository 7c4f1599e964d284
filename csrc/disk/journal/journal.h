// The index of what is on the disk, kept so that it survives `kill -9` and torn writes.
//
// An append-only file of records beside the data file; disk/journal/records.h has their format. It says which
// part of which block lies in which extent, and its CRC32C.
//
// ORDER. What makes a block durable, and never wrong:
//   1. The extent is written, and synced (DiskOp::kSync), before put() is called.
//   2. put(): the record is appended. When durable() has reached its sequence the block is found
//      again after any crash.
//   3. remove(): when durable() has reached ITS sequence the extent may be written again. Before
//      that a crash would bring back a record of bytes that are no longer there.
//
// The lock on the data file is the journal's as well.
//
// Nothing here blocks but open() and the destructor: records are collected in memory, and a thread
// of the journal's own writes out and syncs what has been collected while it wrote before (group
// commit). One owner thread calls all of it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "disk/journal/names.h"
#include "disk/journal/records.h"
#include "disk/journal/stream.h"
#include "wire/wire.h"

namespace kv {

class JournalFile;
class JournalFiles;   // what the journal does to files: the seam for tests
class JournalThread;  // its thread, and the files that it has open
enum class JournalKind;
struct JournalResult;

// What open() found.
struct JournalSummary {
  // The index starts empty although there was a file. Why, in words; "" if not so.
  std::string discarded;
  uint64_t records = 0;    // valid ones
  uint64_t good_bytes = 0;  // of the file, in valid records
  uint64_t torn_bytes = 0;  // after them: cut off
  uint64_t overlapped = 0;  // entries that were given up because a later one has their extent
};

struct JournalOptions {
  std::string path;
  DiskGeometry geometry;
  // A compaction is due when dead records take this many bytes, and more than the live ones.
  uint64_t least_dead_bytes = 4u << 20;
};

class DiskJournal {
 public:
  static constexpr uint64_t kMaxBacklogBytes = 16u << 20;

  // `files`: null for the real ones.
  explicit DiskJournal(JournalOptions options, std::unique_ptr<JournalFiles> files = nullptr);
  // Writes out and syncs what was collected, then ends the thread.
  ~DiskJournal();
  DiskJournal(const DiskJournal&) = delete;
  DiskJournal& operator=(const DiskJournal&) = delete;

  // Reads the journal, or makes one; cuts off what is torn, and starts the thread. 0 or an errno.
  // A journal of another data file (another DiskGeometry), or none of ours at all, is replaced by
  // an empty one.
  int open(DiskContents& found, JournalSummary& summary);

  // Numbers that stand for a spec of a tenant, and for a part of it, in records; the same for the
  // same. 0 at a limit of DiskNames, for a name that is too long, or a part larger than the data
  // file. They last as long as the object; what open() found has its numbers.
  uint32_t spec_number(std::string_view tenant, const wire::Hash& digest);
  uint32_t part_number(uint32_t spec, const wire::Hash& digest, uint64_t bytes);

  // Records that the part of a block lies in an extent, which has been written and synced; a part
  // that has a record already moves. entry.sequence is set here. Returns the sequence to wait for,
  // or 0 if nothing was recorded: the journal has failed, kMaxBacklogBytes wait to be written, or
  // the entry breaks the geometry.
  uint64_t put(DiskEntry entry);
  // Records that a part of a block, or all of them, is no longer on the disk. Returns the sequence
  // to wait for. Never 0: on a journal that has failed, it is reached after a compaction.
  uint64_t remove(uint32_t spec, const wire::Hash& hash, std::optional<uint32_t> part);

  // Has what was collected written out, unless a write is under way: then it follows by itself.
  // Once for a batch.
  void flush();
  // Readable when on_completion() has something to do: to be watched for EPOLLIN. The object's own.
  int completion_fd() const;
  // Learns what has been written; then durable() and error() may have changed.
  void on_completion();

  // Every record up to this sequence survives a crash.
  uint64_t durable() const { return durable_; }
  uint64_t appended() const { return appended_; }  // the last sequence handed out
  // An errno of a write, once one has failed: from then on nothing becomes durable, until a
  // compaction has succeeded (a file system that failed to sync may have dropped what it was given,
  // so only a new file can be believed). 0 else.
  int error() const { return error_; }
  // Collected and not durable yet.
  uint64_t backlog_bytes() const;
  uint64_t file_bytes() const { return file_bytes_; }

  // COMPACTION: a new journal beside the old one, of the live entries alone, synced and renamed over
  // it. Meanwhile the journal works on; a crash leaves the old or the new one, whole. The owner
  // gives it all live entries, a bounded slice of them each time round its loop:
  //     if (compaction_due(n)) begin_compaction();  snapshot(entry)...;  end_snapshot();
  // Live is whatever put() was called for, durable or not, and remove() or a later put() was not.
  // Entries put after begin_compaction() may be given or left out. One that fails is given up and
  // the old journal goes on: compacting() is false then, and what is left of the snapshot ignored.
  bool compaction_due(uint64_t live_entries) const;
  bool compacting() const { return phase_ != Phase::kIdle; }
  // Bytes of the snapshot that wait to be written: the owner pauses while they are many.
  uint64_t snapshot_backlog_bytes() const;
  // False if one is under way. Allowed, and the remedy, when the journal has failed.
  bool begin_compaction();
  // A live entry, as put() took it or open() found it, with its sequence.
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
  bool writing_ = false;  // an append is under way
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
