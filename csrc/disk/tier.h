// The SSD under a node's memory: written after the puts, read before the gets, and bypassed when it
// fails. One loop owns it. It blocks only in open() and the destructor.
#pragma once

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
  std::string io = "auto";      // or one of kDiskIoKinds
  double read_timeout_s = 1.0;  // for which a request waits for its blocks
  double slow_s = 5.0;          // after an operation that takes longer the disk is bypassed
};

// The outcome of promotions.
class DiskEvents {
 public:
  virtual ~DiskEvents() = default;
  virtual void on_promoted(const BlockKey& key) = 0;  // a part of it is in memory
  virtual void on_lost(const BlockKey& key) = 0;      // it cannot be read, now or ever
  virtual void on_bypassed() = 0;                     // none can be read any more
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
    bool digests = true;  // parts have CRC32Cs; else the disk tier computes those that it records
  };
  DiskTier(DiskOptions options, std::string eviction, Memory memory, DiskEvents& events);

  // Opens the files and takes over their contents, which `found` lists. 0 or an errno, as
  // DiskFile::open. `io`, `files`: in place of the real ones.
  int open(DiskContents& found, std::unique_ptr<DiskIo> io = nullptr,
           std::unique_ptr<JournalFiles> files = nullptr);
  // To be watched for EPOLLIN; then poll() is due.
  int io_fd() const { return io_->completion_fd(); }
  int journal_fd() const { return journal_->completion_fd(); }

  // The names of a manifest's ids, before blocks with them come.
  void name_spec(uint32_t spec_id, std::string_view tenant, const Hash& digest) {
    index_->name_spec(spec_id, tenant, digest);
  }
  void name_part(uint32_t spec_id, uint32_t part_id, const Hash& digest, uint64_t bytes) {
    index_->name_part(spec_id, part_id, digest, bytes);
  }

  // Not bypassed.
  bool usable() const { return health_.up(); }
  std::optional<DiskFault> fault() const { return health_.fault(); }
  // Whether each part is on the disk or in memory, and the disk is not bypassed.
  bool has(const BlockKey& key, const PartIds& parts) const;
  void touch(const BlockKey& key) { index_->touch(key); }
  enum class Promote {
    kReading,  // some parts of it; on_promoted() or on_lost() follow
    kLater,    // too much is being read
    kNone,     // it cannot be promoted
  };
  Promote promote(const BlockKey& key, const PartIds& parts);
  bool promoting(const BlockKey& key, const PartIds& parts) const;

  // A client has committed a part in memory.
  void committed(const BlockKey& key, uint32_t part_id);
  // Forgets a block, and cancels its reads and writes. Durable soon after.
  bool remove(const BlockKey& key);
  // Of a block on the disk.
  std::optional<BlockKey> parent_of(const BlockKey& key) const {
    const Block* const block = index_->find_block(key);
    return block == nullptr ? std::nullopt : block->parent;
  }
  // `left` is called when a block is not on the disk any more.
  void when_left(std::function<void(const BlockKey&)> left) { index_->when_left(std::move(left)); }
  // As Table::next_keys.
  bool next_keys(Table::Sweep& sweep, std::vector<BlockKey>& keys) const {
    return index_->next_keys(sweep, keys);
  }

  struct FlushMark {
    uint64_t written;   // of the writer
    uint64_t recorded;  // of the journal
    uint64_t failed;
  };
  // After flushed(mark) is true: all that was committed before is durable, or was skipped; blocks
  // removed before do not come back.
  FlushMark begin_flush();
  bool flushed(const FlushMark& mark) const {
    return writer_->flushed(mark.written) && journal_->durable() >= mark.recorded;
  }
  // Parts that were not written because the disk failed.
  uint64_t failed();
  uint64_t durable_blocks() const;
  // Parts of blocks that were not written, for any reason.
  uint64_t skipped() const;
  // The label of fault(); "" without one.
  const char* fault_name() const;

  void set_now(TimePoint now);
  // Handles completions.
  void poll();
  // Begins reads, writes and records, once per turn of the loop. True: there is more to do at once.
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
  void note(bool bad, std::string sentence) { notices_.push_back({bad, std::move(sentence)}); }
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
  bool mending_ = false;  // a failed journal is being rewritten
  std::vector<DiskCompletion> done_;
  std::unique_ptr<DiskIo> io_;  // last: its end waits for the kernel to let go of the memory
};

}  // namespace kv
