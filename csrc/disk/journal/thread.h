// The thread that writes a journal of the SSD tier, with its (at most two) open files.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "base/event_fd.h"
#include "disk/journal/files.h"

namespace kv {

enum class JournalKind {
  kAppend,  // to the journal; synced
  kBegin,   // a new journal beside it
  kCopy,    // to the new one; synced
  kSwitch,  // the last bytes of the new one, which then replaces the journal
  kDrop,    // removes the new one
};

// A failed kBegin, kCopy or kSwitch leaves no new journal.
struct JournalJob {
  JournalKind kind{};
  uint64_t round = 0;     // the number of the compaction
  uint64_t sequence = 0;  // of the last record in it
  std::string bytes;
};

struct JournalResult {
  JournalKind kind{};
  uint64_t round = 0;
  uint64_t sequence = 0;
  size_t bytes = 0;
  int error = 0;
  // The new journal has replaced the old one, but the rename may not be durable.
  bool unsettled = false;
};

// Performs jobs in order. One owner.
class JournalThread {
 public:
  JournalThread(std::string path, std::unique_ptr<JournalFiles> files);
  // Performs the posted jobs, then ends.
  ~JournalThread();

  // Before start(), on the owner's thread: opens the journal (null: there is none); performs a job.
  int load(JournalFile*& journal);
  JournalResult perform(const JournalJob& job);
  int start();  // 0 or an errno

  void post(JournalJob job);
  int completion_fd() const { return wake_.get(); }
  std::vector<JournalResult> take();

 private:
  void work();
  int begin(const std::string& bytes);
  int copy(const std::string& bytes);
  int switch_over(const std::string& bytes, bool& unsettled);
  void drop();

  const std::string path_;
  const std::string new_path_;
  const std::unique_ptr<JournalFiles> files_;
  std::unique_ptr<JournalFile> journal_;
  std::unique_ptr<JournalFile> new_journal_;
  EventFd wake_;

  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<JournalJob> jobs_;
  std::vector<JournalResult> results_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace kv
