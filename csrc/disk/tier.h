// The SSD under a node's memory: written behind the puts, read back ahead of the gets, and left alone
// when it fails. One loop owns it; it waits for nothing but in open() and the destructor.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "disk/counters.h"
#include "disk/file.h"
#include "disk/health.h"
#include "disk/index.h"
#include "disk/io.h"
#include "disk/journal/files.h"
#include "disk/journal/journal.h"
#include "disk/reader.h"
#include "disk/trial.h"
#include "disk/writer.h"

namespace kv {

struct DiskOptions {
  std::string folder;  // of the tier's files; "": there is no disk
  uint64_t bytes = 0;
  std::string io = "auto";     // "auto", or one of disk_io_kinds()
  double read_timeout_s = 1.0;  // what a request waits for its blocks, at most
  double slow_s = 5.0;          // an operation that takes longer puts the disk aside
};

// What becomes of blocks that were asked for.
class DiskEvents {
 public:
  virtual ~DiskEvents() = default;
  virtual void on_promoted(const BlockKey& key) = 0;  // a part of it is in memory
  virtual void on_lost(const BlockKey& key) = 0;      // what was asked for does not come
  virtual void on_bypassed() = 0;                     // nothing that was asked for comes
};

struct DiskNotice {
  bool bad = false;
  std::string sentence;
};

class DiskTier {
 public:
  static constexpr const char* kDataName = "kvstore.data";
  static constexpr const char* kJournalName = "kvstore.journal";
  static constexpr size_t kDepth = 64;

  struct Memory {
    Table& table;
    Slab& slab;
    uint8_t* pool;
    uint32_t granule_bytes;
    bool digests = true;  // its parts have theirs; else the disk computes those that it records
  };
  DiskTier(DiskOptions options, std::string eviction, Memory memory, DiskEvents& events);

  // Opens the files and takes over what they have; what that is stands in `found`. 0 or an errno, as
  // DiskFile::open says. `io`, `files`: in place of the real ones.
  int open(DiskContents& found, std::unique_ptr<DiskIo> io = nullptr,
           std::unique_ptr<JournalFiles> files = nullptr);
  // To be watched for EPOLLIN; then poll() is due.
  int io_fd() const { return io_->completion_fd(); }
  int journal_fd() const { return journal_->completion_fd(); }

  // What the ids of a manifest mean, before blocks with them come.
  void name_spec(uint32_t spec_id, std::string_view tenant, const Hash& digest) {
    index_->name_spec(spec_id, tenant, digest);
  }
  void name_part(uint32_t spec_id, uint32_t part_id, const Hash& digest, uint64_t bytes) {
    index_->name_part(spec_id, part_id, digest, bytes);
  }

  // Not bypassed.
  bool usable() const { return health_.up(); }
  std::optional<DiskFault> fault() const { return health_.fault(); }
  // Each part is on the disk or in memory, and the disk may be used.
  bool has(const BlockKey& key, const PartIds& parts) const;
  void touch(const BlockKey& key) { index_->touch(key); }
  enum class Promote {
    kReading,  // some parts of it: on_promoted() or on_lost() tell
    kLater,    // too much is being read
    kNone,     // it cannot be had
  };
  Promote promote(const BlockKey& key, const PartIds& parts);
  bool promoting(const BlockKey& key, const PartIds& parts) const;

  // A part is committed in memory, by a client.
  void committed(const BlockKey& key, uint32_t part_id);
  // Forgets blocks, and what of them is under way. Recorded at once; durable soon after.
  bool remove(const BlockKey& key);
  // As Table::next_keys.
  bool next_keys(Table::Sweep& sweep, std::vector<BlockKey>& keys) const {
    return index_->next_keys(sweep, keys);
  }

  // How far it had come when somebody began to wait.
  struct FlushMark {
    uint64_t written;   // of the writer
    uint64_t recorded;  // of the journal
  };
  // flushed(the mark returned): whatever was committed before is durable, or was skipped; whatever
  // was removed before does not come back.
  FlushMark begin_flush();
  bool flushed(const FlushMark& mark) const {
    return writer_->flushed(mark.written) && journal_->durable() >= mark.recorded;
  }
  uint64_t durable_blocks() const;
  // Parts of blocks that were not written, for whatever reason.
  uint64_t skipped() const;
  // The label of fault(); "" without one.
  const char* fault_name() const;

  void set_now(TimePoint now);
  // Takes what has been completed.
  void poll();
  // Begins what is to be done, once per turn of the loop. True: it has more to do at once.
  bool pump();
  std::optional<TimePoint> next_deadline() const;

  const DiskCounters& counters() const { return counters_; }
  DiskCounters& counters() { return counters_; }
  void add_stats(StatList& list) const;
  const DiskOptions& options() const { return options_; }
  std::vector<DiskNotice> take_notices() { return std::exchange(notices_, {}); }
  bool has_notices() const { return !notices_.empty(); }

 private:
  int open_journal(DiskContents& found, std::unique_ptr<JournalFiles> files);
  void tell(bool bad, std::string sentence) { notices_.push_back({bad, std::move(sentence)}); }
  void complete(const DiskCompletion& done);
  void complete_read(const DiskReader::Ended& ended, const DiskCompletion& done);
  void failed(DiskFault fault, int error);
  void bypass(int error);
  void watch_time();
  void run_trial();
  void end_trial(bool well);

  DiskOptions options_;
  std::string eviction_;
  Memory memory_;
  DiskEvents& events_;
  DiskHealth health_;
  DiskCounters counters_;
  TimePoint now_{}, bypassed_since_{};
  std::vector<DiskNotice> notices_;
  DiskFile file_;
  std::unique_ptr<DiskJournal> journal_;
  std::unique_ptr<DiskIndex> index_;
  std::unique_ptr<DiskWriter> writer_;
  std::unique_ptr<DiskReader> reader_;
  DiskTrial trial_;
  bool mending_ = false;  // a journal that failed is being written anew
  std::vector<DiskCompletion> done_;
  std::unique_ptr<DiskIo> io_;  // last: its end waits for the kernel to let go of the memory
};

}  // namespace kv
