// The thread that writes a journal of the SSD tier, and the two files that it may have open.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/file.h"
#include "disk/journal/files.h"

namespace kv {

enum class JournalKind {
  kAppend,  // to the journal; synced
  kBegin,   // a new journal beside it
  kCopy,    // to the new one; synced
  kSwitch,  // the last of the new one; it takes the journal's place
  kDrop,    // the new one goes
};

// One that fails of kBegin, kCopy and kSwitch leaves no new journal.
struct JournalJob {
  JournalKind kind{};
  uint64_t round = 0;     // which compaction it is of
  uint64_t sequence = 0;  // the last record that is done with it
  std::string bytes;
};

struct JournalResult {
  JournalKind kind{};
  uint64_t round = 0;
  uint64_t sequence = 0;
  size_t bytes = 0;
  int error = 0;
  // The new journal has taken the old one's place, which may not survive a crash of the machine.
  bool unsettled = false;
};

// Does jobs in the order in which they come. One owner.
class JournalThread {
 public:
  JournalThread(std::string path, std::unique_ptr<JournalFiles> files);
  // Does what was posted, then ends.
  ~JournalThread();

  // Before start(), by the owner: the journal as it is, null if there is none; or a job done at once.
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
  File wake_;

  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<JournalJob> jobs_;
  std::vector<JournalResult> results_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace kv
