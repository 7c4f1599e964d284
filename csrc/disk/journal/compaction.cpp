// A new journal beside the old one, of what is alive: the other half of DiskJournal.
#include <algorithm>

#include "disk/journal/journal.h"
#include "disk/journal/thread.h"

namespace kv {
namespace {

// A slice of a snapshot that is worth a write and a sync.
constexpr size_t kCopyBytes = 256u << 10;

}  // namespace

bool DiskJournal::compaction_due(uint64_t live_entries) const {
  if (phase_ != Phase::kIdle || error_ != 0 || file_bytes_ < not_before_bytes_) return false;
  const uint64_t live = live_entries * kMaxPutBytes;
  return file_bytes_ > 2 * live && file_bytes_ - live > options_.least_dead_bytes;
}

bool DiskJournal::begin_compaction() {
  if (!open_ || phase_ != Phase::kIdle) return false;
  phase_ = Phase::kCopying;
  ++round_;
  new_journal_.begin(options_.geometry);
  new_bytes_ = copying_bytes_ = 0;
  post_new(JournalKind::kBegin);
  return true;
}

void DiskJournal::post_new(JournalKind kind) {
  const size_t bytes = new_journal_.collected.size();
  new_bytes_ += bytes;
  copying_bytes_ += bytes;
  thread_->post({kind, round_, appended_, std::exchange(new_journal_.collected, {})});
}

void DiskJournal::snapshot(const DiskEntry& entry) {
  if (phase_ != Phase::kCopying || !is_sound(entry)) return;
  new_journal_.put(entry, names_);
  if (new_journal_.collected.size() >= kCopyBytes) post_new(JournalKind::kCopy);
}

void DiskJournal::end_snapshot() {
  if (phase_ != Phase::kCopying) return;
  phase_ = Phase::kSwitching;
  post_new(JournalKind::kSwitch);
}

uint64_t DiskJournal::snapshot_backlog_bytes() const {
  return phase_ == Phase::kIdle ? 0 : copying_bytes_ + new_journal_.collected.size();
}

void DiskJournal::on_compacted(const JournalResult& result) {
  copying_bytes_ -= result.bytes;
  if (result.unsettled) {
    // Which of the two a crash would leave is not known: nothing more is believed to be durable.
    journal_ = std::move(new_journal_);
    fail(result.error);
    return end_compaction(result.error);
  }
  if (result.error != 0) return end_compaction(result.error);
  if (result.kind != JournalKind::kSwitch) return;
  journal_ = std::move(new_journal_);
  file_bytes_ = new_bytes_;
  durable_ = std::max(durable_, result.sequence);
  error_ = 0;
  ++compactions_;
  end_compaction(0);
}

void DiskJournal::end_compaction(int error) {
  phase_ = Phase::kIdle;
  new_journal_ = {};
  compaction_error_ = error;
  not_before_bytes_ = error == 0 ? 0 : file_bytes_ + file_bytes_ / 4;
}

}  // namespace kv
