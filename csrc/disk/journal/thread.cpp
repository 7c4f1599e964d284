#include "disk/journal/thread.h"

#include "base/quiet_thread.h"

namespace kv {

JournalThread::JournalThread(std::string path, std::unique_ptr<JournalFiles> files)
    : path_(std::move(path)), new_path_(path_ + ".new"), files_(std::move(files)) {}

JournalThread::~JournalThread() {
  if (!thread_.joinable()) return;
  {
    const std::scoped_lock lock(mutex_);
    stopping_ = true;
  }
  ready_.notify_all();
  thread_.join();
}

int JournalThread::load(JournalFile*& journal) {
  // Left by a compaction that a crash interrupted.
  if (const int error = files_->remove(new_path_); error != 0 && error != ENOENT) return error;
  const int error = files_->open(path_, journal_);
  journal = journal_.get();
  return error == ENOENT ? 0 : error;
}

int JournalThread::start() {
  if (const int error = wake_.open()) return error;
  thread_ = quiet_thread([this] { work(); });
  return 0;
}

void JournalThread::post(JournalJob job) {
  {
    const std::scoped_lock lock(mutex_);
    jobs_.push_back(std::move(job));
  }
  ready_.notify_one();
}

std::vector<JournalResult> JournalThread::take() {
  const std::scoped_lock lock(mutex_);
  wake_.clear();
  return std::exchange(results_, {});
}

void JournalThread::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    ready_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    const JournalJob job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    const JournalResult result = perform(job);
    lock.lock();
    results_.push_back(result);
    wake_.signal();
  }
}

JournalResult JournalThread::perform(const JournalJob& job) {
  JournalResult result{job.kind, job.round, job.sequence, job.bytes.size()};
  switch (job.kind) {
    case JournalKind::kAppend:
      result.error = journal_->append(job.bytes);
      if (result.error == 0) result.error = journal_->sync();
      break;
    case JournalKind::kBegin: result.error = begin(job.bytes); break;
    case JournalKind::kCopy: result.error = copy(job.bytes); break;
    case JournalKind::kSwitch: result.error = switch_over(job.bytes, result.unsettled); break;
    case JournalKind::kDrop: drop(); break;
  }
  return result;
}

int JournalThread::begin(const std::string& bytes) {
  int error = files_->create(new_path_, new_journal_);
  if (error == 0) error = new_journal_->append(bytes);
  if (error != 0) drop();
  return error;
}

// Synced piece by piece, so that the last sync, which delays appends, is short. If one piece fails
// the new journal is removed at once: later pieces must not complete a file with a gap.
int JournalThread::copy(const std::string& bytes) {
  if (!new_journal_) return ECANCELED;
  int error = new_journal_->append(bytes);
  if (error == 0) error = new_journal_->sync();
  if (error != 0) drop();
  return error;
}

int JournalThread::switch_over(const std::string& bytes, bool& unsettled) {
  if (const int error = copy(bytes)) return error;
  if (const int error = files_->rename(new_path_, path_)) {
    drop();
    return error;
  }
  journal_ = std::move(new_journal_);
  const int error = files_->sync_directory(path_);
  unsettled = error != 0;
  return error;
}

void JournalThread::drop() {
  if (!std::exchange(new_journal_, nullptr)) return;
  files_->remove(new_path_);
}

}  // namespace kv
