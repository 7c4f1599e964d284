#include "disk/reader.h"

#include "digest/crc32c.h"
#include "disk/file.h"

namespace kv {
namespace {

constexpr uint64_t kReaderIds = uint64_t{1} << 61;

}  // namespace

DiskReader::DiskReader(Table& memory, DiskIndex& index, uint8_t* pool, int fd, uint64_t most_bytes,
                       DiskCounters& counters)
    : memory_(memory), index_(index), pool_(pool), fd_(fd), most_bytes_(most_bytes),
      counters_(counters), last_id_(kReaderIds) {}

DiskReader::Start DiskReader::start(const BlockKey& key, uint32_t part_id, TimePoint now) {
  const PartKey name{key, part_id};
  if (const auto found = reads_.find(name); found != reads_.end())
    return found->second.cancelled ? Start::kAbsent : Start::kReading;
  const Part* part = index_.find(key, part_id);
  if (part == nullptr) return Start::kAbsent;
  Block* source = index_.find_block(key);
  const Table::Reserved reserved =
      memory_.reserve(key, source->parent, part_id, part->slot.bytes, kSession);
  switch (reserved.status) {
    case BlockStatus::kGranted: break;
    case BlockStatus::kExists: return Start::kThere;
    case BlockStatus::kNoSpace: return Start::kNoSpace;
    default: return Start::kAbsent;
  }
  index_.pin(*source);
  bytes_ += part->slot.bytes;
  reads_.emplace(name, Read{reserved.slot, part->slot, source, part->crc, false, now, now});
  queue_.push_back(name);
  return Start::kReading;
}

void DiskReader::cancel(const BlockKey& key) {
  for (auto& [name, read] : reads_) read.cancelled |= name.block == key;
}

std::vector<BlockKey> DiskReader::abandon() {
  std::vector<BlockKey> given_up;
  for (; !queue_.empty(); queue_.pop_front()) {
    const auto found = reads_.find(queue_.front());
    const Read read = found->second;
    reads_.erase(found);
    end(queue_.front(), read, false);
    given_up.push_back(queue_.front().block);
  }
  return given_up;
}

void DiskReader::pump(DiskIo& io, TimePoint now, size_t ended) {
  for (; !queue_.empty() && flying_.size() < kMaxReads + ended; queue_.pop_front()) {
    const PartKey& key = queue_.front();
    Read& read = reads_.find(key)->second;
    const DiskRequest request{last_id_ + 1,
                              DiskOp::kRead,
                              fd_,
                              DiskFile::kDataOffset + read.extent.offset,
                              pool_ + read.slot.offset,
                              DiskFile::aligned(read.slot.bytes)};
    if (!io.submit(request)) return;
    read.submitted = now;
    flying_.emplace(++last_id_, key);
  }
}

DiskReader::Ended DiskReader::complete(const DiskCompletion& done, TimePoint now) {
  const auto flight = flying_.find(done.id);
  if (flight == flying_.end()) return {};
  const PartKey key = flight->second;
  flying_.erase(flight);
  const auto found = reads_.find(key);
  const Read read = found->second;
  reads_.erase(found);
  End outcome = End::kPromoted;
  if (done.error == 0) counters_.read_bytes += read.slot.bytes;
  if (read.cancelled) outcome = End::kCancelled;
  else if (done.error != 0) outcome = End::kFailed;
  else if (crc32c(pool_ + read.slot.offset, read.slot.bytes, 0) != read.crc)
    outcome = End::kCorrupt;
  end(key, read, outcome == End::kPromoted);
  if (outcome == End::kPromoted) {
    ++counters_.promoted;
    errors_.erase(key);
    const std::chrono::nanoseconds took = now - read.since;
    counters_.promotions.observe(static_cast<uint64_t>(took.count()));
  } else if (outcome == End::kCorrupt || (outcome == End::kFailed && !may_recover(key))) {
    // Not found again on the disk.
    if (index_.remove(key.block)) ++counters_.dropped;
  }
  return {outcome, key.block};
}

bool DiskReader::may_recover(const PartKey& key) {
  if (errors_.size() >= kMostRemembered) errors_.clear();
  if (++errors_[key] < kMostErrors) return true;
  errors_.erase(key);
  return false;
}

void DiskReader::end(const PartKey& key, const Read& read, bool keep) {
  index_.unpin(*read.source);
  bytes_ -= read.slot.bytes;
  if (keep) {
    memory_.commit(key.block, key.part_id, kSession, read.slot.generation, read.crc);
  } else if (const auto slot = memory_.take_back(key.block, key.part_id, kSession, std::nullopt)) {
    memory_.release(*slot);
  }
}

std::optional<TimePoint> DiskReader::oldest() const {
  std::optional<TimePoint> oldest;
  for (const auto& [id, key] : flying_) {
    const TimePoint submitted = reads_.find(key)->second.submitted;
    if (!oldest || submitted < *oldest) oldest = submitted;
  }
  return oldest;
}

}  // namespace kv
