#include "disk/tier.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "disk/journal/files.h"

namespace kv {
namespace {

bool is_full(int error) { return error == ENOSPC || error == EDQUOT || error == EFBIG; }

// By DiskFault.
constexpr std::array kFaultTexts{"it is full", "it cannot be read", "it cannot be written",
                                 "it does not answer in time", "its index cannot be written",
                                 "what was written cannot be synced"};

std::string reason_of(int error) {
  return error == 0 ? std::string() : std::string(" (") + std::strerror(error) + ")";
}

}  // namespace

DiskTier::DiskTier(DiskOptions options, std::string eviction, Memory memory, DiskEvents& events)
    : options_(std::move(options)), eviction_(std::move(eviction)), memory_(memory),
      events_(events) {}

int DiskTier::open(DiskContents& found, std::unique_ptr<DiskIo> io,
                   std::unique_ptr<JournalFiles> files) {
  const uint64_t granule = memory_.granule_bytes;
  const uint64_t bytes = options_.bytes / granule * granule;
  if (const int error = file_.open(options_.folder + "/" + kDataName, bytes)) return error;
  if (const int error = open_journal(found, std::move(files))) return error;
  int error = 0;
  io_ = io ? std::move(io) : make_disk_io(options_.io, kDepth, error);
  if (io_ == nullptr) return error;
  const uint64_t share = memory_.slab.pool_bytes() / 4;
  writer_ = std::make_unique<DiskWriter>(memory_.table, *index_, memory_.pool, file_.fd(), share,
                                         counters_, memory_.digests);
  reader_ = std::make_unique<DiskReader>(memory_.table, *index_, memory_.pool, file_.fd(), share,
                                         counters_);
  if (!file_.direct())
    note(false, "the file system of " + options_.folder +
                    " refuses O_DIRECT: the disk is used through the page cache");
  return 0;
}

int DiskTier::open_journal(DiskContents& found, std::unique_ptr<JournalFiles> files) {
  const DiskGeometry geometry{file_.id(), file_.data_bytes(), memory_.granule_bytes};
  journal_ = std::make_unique<DiskJournal>(
      JournalOptions{options_.folder + "/" + kJournalName, geometry, 4u << 20}, std::move(files));
  JournalSummary summary;
  if (const int error = journal_->open(found, summary)) return error;
  index_ = std::make_unique<DiskIndex>(geometry, eviction_, *journal_);
  const uint64_t parts = index_->restore(found);
  if (!summary.discarded.empty()) note(true, "the disk starts empty: " + summary.discarded);
  if (summary.torn_bytes != 0)
    note(true, std::to_string(summary.torn_bytes) +
                   " bytes at the end of the disk's index were torn and are cut off");
  if (parts != 0) note(false, std::to_string(index_->blocks()) + " blocks were found on the disk");
  return 0;
}

void DiskTier::set_now(TimePoint now) {
  now_ = now;
  index_->set_now(std::chrono::duration<double>(now.time_since_epoch()).count());
}

bool DiskTier::has(const BlockKey& key, const PartIds& parts) const {
  if (!usable()) return false;
  Block* block = memory_.table.find(key);
  for (const uint32_t part_id : parts) {
    const Part* part = block == nullptr ? nullptr : block->find(part_id);
    if ((part == nullptr || !part->committed()) && index_->find(key, part_id) == nullptr)
      return false;
  }
  return true;
}

DiskTier::Promote DiskTier::promote(const BlockKey& key, const PartIds& parts) {
  if (!has(key, parts)) return Promote::kNone;
  if (!reader_->has_room() && !promoting(key, parts)) return Promote::kLater;
  bool reading = false;
  for (const uint32_t part_id : parts) {
    Block* block = memory_.table.find(key);
    const Part* there = block == nullptr ? nullptr : block->find(part_id);
    if (there != nullptr && there->committed()) continue;
    switch (reader_->start(key, part_id, now_)) {
      case DiskReader::Start::kReading: reading = true; break;
      case DiskReader::Start::kThere: break;
      default: return Promote::kNone;
    }
  }
  touch(key);
  return reading ? Promote::kReading : Promote::kNone;
}

bool DiskTier::promoting(const BlockKey& key, const PartIds& parts) const {
  return std::any_of(parts.begin(), parts.end(), [&](uint32_t part_id) {
    return reader_->reading({key, part_id});
  });
}

void DiskTier::committed(const BlockKey& key, uint32_t part_id) {
  if (!usable()) {
    ++counters_.skipped[DiskSkip::kBypassed];
    return;
  }
  if (Block* block = memory_.table.find(key)) writer_->add(*block, part_id);
}

bool DiskTier::remove(const BlockKey& key) {
  reader_->cancel(key);
  const Block* block = index_->find_block(key);
  if (block == nullptr) return false;
  // A part that is being written is reserved in the index.
  if (block->reserved != 0) writer_->cancel(key);
  const bool removed = index_->remove(key);
  counters_.deleted += removed ? 1 : 0;
  return removed;
}

DiskTier::FlushMark DiskTier::begin_flush() {
  return {writer_->add_all(), journal_->appended(), failed()};
}

uint64_t DiskTier::failed() {
  return counters_.skipped[DiskSkip::kFailed] + counters_.skipped[DiskSkip::kBypassed];
}

uint64_t DiskTier::durable_blocks() const {
  const uint64_t blocks = index_->blocks() - std::min(index_->blocks(), writer_->unrecorded());
  return blocks - std::min(blocks, index_->undurable());
}

uint64_t DiskTier::skipped() const {
  const auto& values = counters_.skipped.values;
  return std::accumulate(values.begin(), values.end(), uint64_t{0});
}

const char* DiskTier::fault_name() const {
  const auto fault = health_.fault();
  return fault ? kDiskFaultNames[static_cast<size_t>(*fault)] : "";
}

void DiskTier::poll() {
  done_.clear();
  io_->take(done_);
  // So that the disk reads on while digests are computed.
  if (usable()) reader_->pump(*io_, now_, done_.size());
  io_->flush();
  for (const DiskCompletion& done : done_) complete(done);
  journal_->on_completion();
  if (journal_->error() != 0 && usable()) {
    ++counters_.errors[DiskError::kJournal];
    failed(DiskFault::kJournal, journal_->error());
  }
  index_->advance();
  writer_->advance(journal_->durable());
}

void DiskTier::complete(const DiskCompletion& done) {
  const bool slow = static_cast<double>(done.ns) > options_.slow_s * 1e9;
  if (trial_.complete(*io_, done)) return slow ? trial_.reject() : void();
  if (slow) failed(DiskFault::kSlow, 0);
  const DiskWriter::Done written = writer_->complete(done);
  if (!written.ours) return complete_read(reader_->complete(done, now_), done);
  if (done.error == 0) return health_.succeeded(false);
  ++counters_.errors[written.sync ? DiskError::kSync : DiskError::kWrite];
  const DiskFault fault = written.sync ? DiskFault::kSync : DiskFault::kWriteErrors;
  failed(is_full(done.error) ? DiskFault::kFull : fault, done.error);
}

void DiskTier::complete_read(const DiskReader::Ended& ended, const DiskCompletion& done) {
  switch (ended.end) {
    case DiskReader::End::kNotOurs: return;
    case DiskReader::End::kPromoted: health_.succeeded(true); return events_.on_promoted(ended.key);
    case DiskReader::End::kCorrupt: ++counters_.errors[DiskError::kCorrupt]; break;
    case DiskReader::End::kFailed:
      ++counters_.errors[DiskError::kRead];
      failed(DiskFault::kReadErrors, done.error);
      break;
    case DiskReader::End::kCancelled: break;
  }
  events_.on_lost(ended.key);
}

void DiskTier::failed(DiskFault fault, int error) {
  if (health_.failed(fault, now_)) bypass(error);
}

void DiskTier::bypass(int error) {
  const DiskFault fault = *health_.fault();
  ++counters_.bypasses[fault];
  bypassed_since_ = now_;
  note(true, "the disk at " + options_.folder + " is bypassed since " +
                 kFaultTexts[static_cast<size_t>(fault)] + reason_of(error) +
                 ": until it works again, blocks are kept in memory only; "
                 "it is retried with growing pauses");
  writer_->abandon(DiskSkip::kBypassed);
  reader_->abandon();
  events_.on_bypassed();
}

// Extents are written and synced, then recorded, then the journal is synced: ORDER in
// journal/journal.h.
bool DiskTier::pump() {
  watch_time();
  run_trial();
  bool more = false;
  if (usable()) {
    reader_->pump(*io_, now_);
    more = writer_->pump(*io_, reader_->waiting() != 0, now_);
  }
  writer_->record();
  more |= index_->compact(usable());
  journal_->flush();
  index_->advance();  // a removal without a record is durable at once
  writer_->advance(journal_->durable());
  io_->flush();
  return more;
}

void DiskTier::watch_time() {
  const std::optional<TimePoint> next = usable() ? next_deadline() : std::nullopt;
  if (next && *next <= now_) failed(DiskFault::kSlow, 0);
}

// Tries a page; then rewrites a failed journal.
void DiskTier::run_trial() {
  if (health_.trial_due(now_)) {
    health_.trial_began();
    const uint64_t offset = DiskFile::kDataOffset + index_->scratch().offset;
    if (!trial_.begin(*io_, file_.fd(), offset)) return end_trial(false);
  }
  if (trial_.state() == DiskTrial::State::kBad) return end_trial(false);
  if (trial_.state() != DiskTrial::State::kWell) return;
  if (journal_->error() == 0) return end_trial(true);
  if (journal_->compacting()) return;
  if (mending_) return end_trial(false);
  mending_ = true;
  index_->compact(true);
}

void DiskTier::end_trial(bool well) {
  trial_.reset();
  mending_ = false;
  health_.trial_ended(well, now_);
  if (!well) return;
  const std::chrono::duration<double> away = now_ - bypassed_since_;
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%.1f s", away.count());
  note(false, "the disk at " + options_.folder + " is used again after " + seconds);
}

std::optional<TimePoint> DiskTier::next_deadline() const {
  if (!usable()) return health_.next_trial();
  std::optional<TimePoint> oldest = writer_->oldest();
  if (const auto read = reader_->oldest(); read && (!oldest || *read < *oldest)) oldest = read;
  if (!oldest) return std::nullopt;
  return *oldest + std::chrono::duration_cast<TimePoint::duration>(
                       std::chrono::duration<double>(options_.slow_s));
}

void DiskTier::add_stats(StatList& list) const {
  DiskGauges gauges{
      index_->bytes(),    index_->used_bytes(),   index_->blocks(),
      durable_blocks(),   journal_->file_bytes(), writer_->queued() + writer_->writing(),
      reader_->waiting(), index_->evictions(),    {}};
  if (const auto fault = health_.fault()) gauges.bypassed[*fault] = 1;
  add_disk_stats(list, gauges, counters_);
}

}  // namespace kv
