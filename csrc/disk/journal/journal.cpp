#include "disk/journal/journal.h"

#include <poll.h>

#include <algorithm>

#include "base/random.h"
#include "disk/journal/files.h"
#include "disk/journal/replay.h"
#include "disk/journal/thread.h"

namespace kv {
namespace {

constexpr size_t kReadBytes = 1u << 20;
constexpr size_t kCopyBytes = 256u << 10;  // of a snapshot, for each write and sync

// Feeds all of a file to `replay`; `good` of its `all` bytes were valid.
int read_all(JournalFile& file, DiskReplay& replay, uint64_t& good, uint64_t& all) {
  std::string buffer(kReadBytes, '\0');
  size_t kept = 0;
  for (size_t got = 1; got != 0;) {
    if (const int error = file.read(buffer.data() + kept, buffer.size() - kept, all, got))
      return error;
    all += got;
    const size_t taken = replay.feed({buffer.data(), kept + got});
    good += taken;
    kept += got - taken;
    if (replay.state() == DiskReplay::State::kNoJournal ||
        replay.state() == DiskReplay::State::kOtherGeometry)
      return 0;
    if (replay.state() == DiskReplay::State::kEnded) kept = 0;  // only its length matters now
    std::copy_n(buffer.begin() + static_cast<ptrdiff_t>(taken), kept, buffer.begin());
  }
  return 0;
}

}  // namespace

void JournalStream::begin(const DiskGeometry& geometry) {
  const uint64_t id = random_u64();
  *this = {};
  seed = journal_seed(id);
  collected = encode_header({id, geometry});
}

void JournalStream::put(const DiskEntry& entry, const DiskNames& names) {
  if (specs.insert(entry.spec).second) append_record(collected, seed, *names.spec(entry.spec));
  if (parts.insert(entry.part).second) append_record(collected, seed, *names.part(entry.part));
  append_record(collected, seed, entry);
}

void JournalStream::remove(const DiskRemoval& removal) {
  // Not needed if nothing of it was put into this file.
  if (specs.contains(removal.spec) && (!removal.part || parts.contains(*removal.part)))
    append_record(collected, seed, removal);
}

DiskJournal::DiskJournal(JournalOptions options, std::unique_ptr<JournalFiles> files)
    : options_(std::move(options)),
      thread_(std::make_unique<JournalThread>(options_.path,
                                              files ? std::move(files) : real_journal_files())) {}

DiskJournal::~DiskJournal() {
  if (!open_) return;
  while (phase_ == Phase::kSwitching) await();
  if (phase_ == Phase::kCopying) thread_->post({JournalKind::kDrop, round_, 0, {}});
  flush();
  while (writing_) await();  // then the records collected meanwhile are written
}

void DiskJournal::await() {
  pollfd watched{completion_fd(), POLLIN, 0};
  poll(&watched, 1, -1);
  on_completion();
}

int DiskJournal::open(DiskContents& found, JournalSummary& summary) {
  if (!options_.geometry.valid()) return EINVAL;
  JournalFile* file = nullptr;
  if (const int error = thread_->load(file)) return error;
  found = {};
  summary = {};
  bool fresh = file == nullptr;
  if (!fresh)
    if (const int error = recover(*file, found, summary, fresh)) return error;
  if (fresh) {
    journal_.begin(options_.geometry);
    if (const int error = replace()) return error;
  }
  if (const int error = thread_->start()) return error;
  open_ = true;
  return 0;
}

int DiskJournal::recover(JournalFile& file, DiskContents& found, JournalSummary& summary,
                         bool& fresh) {
  DiskReplay replay(options_.geometry);
  uint64_t good = 0, all = 0;
  if (const int error = read_all(file, replay, good, all)) return error;
  if (replay.state() == DiskReplay::State::kOtherGeometry)
    summary.discarded = "it is of another data file";
  else if (good < kJournalHeaderBytes)
    summary.discarded = "its header is damaged, or it is no journal";
  fresh = !summary.discarded.empty();
  if (fresh) return 0;
  summary.records = replay.records();
  summary.overlapped = replay.overlapped();
  summary.good_bytes = good;
  summary.torn_bytes = all - good;
  if (all != good)
    if (const int error = file.truncate(good)) return error;
  // What was found may never have been synced.
  if (const int error = file.sync()) return error;
  names_ = replay.names();
  found = std::move(replay.contents());
  journal_.seed = journal_seed(replay.header().file_id);
  for (const DiskSpec& spec : found.specs) journal_.specs.insert(spec.number);
  for (const DiskPart& part : found.parts) journal_.parts.insert(part.number);
  appended_ = durable_ = found.last_sequence;
  file_bytes_ = good;
  return 0;
}

// Replaces the journal by a new one, at once. Only before the thread is started.
int DiskJournal::replace() {
  file_bytes_ = journal_.collected.size();
  const JournalResult begun =
      thread_->perform({JournalKind::kBegin, 0, 0, std::move(journal_.collected)});
  journal_.collected.clear();
  if (begun.error != 0) return begun.error;
  return thread_->perform({JournalKind::kSwitch, 0, 0, {}}).error;
}

uint32_t DiskJournal::spec_number(std::string_view tenant, const wire::Hash& digest) {
  return names_.spec_number(tenant, digest);
}

uint32_t DiskJournal::part_number(uint32_t spec, const wire::Hash& digest, uint64_t bytes) {
  return bytes > options_.geometry.data_bytes ? 0 : names_.part_number(spec, digest, bytes);
}

bool DiskJournal::is_sound(const DiskEntry& entry) const {
  const DiskPart* part = names_.part(entry.part);
  return part != nullptr && part->spec == entry.spec && part->bytes == entry.bytes &&
         options_.geometry.has_extent(entry.offset, entry.bytes);
}

uint64_t DiskJournal::put(DiskEntry entry) {
  if (error_ != 0 && phase_ == Phase::kIdle) return 0;
  if (std::max(backlog_bytes(), snapshot_backlog_bytes()) > kMaxBacklogBytes) return 0;
  if (!is_sound(entry)) return 0;
  entry.sequence = ++appended_;
  if (error_ == 0) journal_.put(entry, names_);
  if (phase_ != Phase::kIdle) new_journal_.put(entry, names_);
  return appended_;
}

uint64_t DiskJournal::remove(uint32_t spec, const wire::Hash& hash, std::optional<uint32_t> part) {
  const DiskRemoval removal{spec, part, hash, ++appended_};
  if (error_ == 0) journal_.remove(removal);
  if (phase_ != Phase::kIdle) new_journal_.remove(removal);
  return appended_;
}

int DiskJournal::completion_fd() const { return thread_->completion_fd(); }

uint64_t DiskJournal::backlog_bytes() const { return journal_.collected.size() + writing_bytes_; }

void DiskJournal::flush() {
  // While the new journal replaces the old one, it is unknown which of them an append would go to.
  if (error_ != 0 || phase_ == Phase::kSwitching || writing_) return;
  if (journal_.collected.empty()) {
    // Only removals without a record.
    durable_ = appended_;
    return;
  }
  writing_ = true;
  writing_bytes_ = journal_.collected.size();
  thread_->post({JournalKind::kAppend, 0, appended_, std::exchange(journal_.collected, {})});
}

void DiskJournal::on_completion() {
  for (const JournalResult& result : thread_->take()) {
    if (result.kind == JournalKind::kAppend) on_appended(result);
    else if (result.round == round_ && phase_ != Phase::kIdle) on_compacted(result);
  }
  flush();
}

void DiskJournal::on_appended(const JournalResult& result) {
  writing_ = false;
  writing_bytes_ = 0;
  if (result.error != 0) return fail(result.error);
  durable_ = std::max(durable_, result.sequence);
  file_bytes_ += result.bytes;
}

void DiskJournal::fail(int error) {
  error_ = error;
  journal_.collected.clear();  // only a new journal is reliable
}

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
    // A crash may leave either of the two: nothing more counts as durable.
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
