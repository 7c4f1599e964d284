#include "disk/writer.h"

#include <algorithm>
#include <cstring>

#include "digest/crc32c.h"
#include "disk/file.h"

namespace kv {
namespace {

constexpr uint64_t kWriterIds = uint64_t{1} << 62;

}  // namespace

DiskWriter::DiskWriter(Table& memory, DiskIndex& index, uint8_t* pool, int fd,
                       uint64_t pinned_bytes, DiskCounters& counters, bool digests)
    : memory_(memory), index_(index), pool_(pool), fd_(fd), most_pinned_bytes_(pinned_bytes),
      counters_(counters), digests_(digests), last_id_(kWriterIds) {}

void DiskWriter::add(Block& block, uint32_t part_id) { add(block, part_id, kMaxQueued); }

void DiskWriter::add(Block& block, uint32_t part_id, size_t most) {
  const PartKey key{block.key, part_id};
  if (index_.find(block.key, part_id) != nullptr || waiting_.contains(key)) return;
  if (queue_.size() >= most) {
    ++counters_.skipped[DiskSkip::kQueueFull];
    return;
  }
  const uint64_t bytes = block.find(part_id)->slot.bytes;
  // With tenants, pinned blocks count for their limits: the queue must not use those up.
  const bool fits = !memory_.quotas().limited() && pinned_bytes_ + bytes <= most_pinned_bytes_;
  if (fits) {
    memory_.pin(block);
    pinned_bytes_ += bytes;
  }
  queue_.push_back({key, ++last_mark_, fits ? &block : nullptr, bytes});
  outstanding_.insert(last_mark_);
  waiting_.insert(key);
}

uint64_t DiskWriter::add_all() {
  std::unordered_set<const Block*> seen;
  std::vector<Block*> all;
  memory_.for_each([&](Block& block) { all.push_back(&block); });
  for (Block* block : all) add_chain(*block, seen);
  return last_mark_;
}

// Its ancestors first.
void DiskWriter::add_chain(Block& block, std::unordered_set<const Block*>& seen) {
  std::vector<Block*> up;
  for (Block* at = &block; at != nullptr && seen.insert(at).second;
       at = at->parent ? memory_.find(*at->parent) : nullptr)
    up.push_back(at);
  for (auto at = up.rbegin(); at != up.rend(); ++at)
    for (const Part& part : (*at)->parts)
      if (part.committed()) add(**at, part.part_id, SIZE_MAX);
}

void DiskWriter::cancel(const BlockKey& key) {
  for (auto& [id, writing] : writing_) writing.cancelled |= writing.key.block == key;
  for (Writing& one : written_) one.cancelled |= one.key.block == key;
  for (Writing& one : syncing_) one.cancelled |= one.key.block == key;
  for (Writing& one : synced_) one.cancelled |= one.key.block == key;
}

void DiskWriter::abandon(DiskSkip why) {
  for (; !queue_.empty(); queue_.pop_front()) {
    skip(queue_.front().mark, why);
    end_queued(queue_.front());
  }
}

void DiskWriter::end_queued(const Queued& entry) {
  waiting_.erase(entry.key);
  if (entry.pinned == nullptr) return;
  pinned_bytes_ -= entry.bytes;
  memory_.unpin(*entry.pinned);
}

void DiskWriter::skip(uint64_t mark, DiskSkip why) {
  ++counters_.skipped[why];
  outstanding_.erase(mark);
}

bool DiskWriter::pump(DiskIo& io, bool beside_reads, TimePoint now) {
  const size_t most = beside_reads ? kMaxWritesBeside : kMaxWrites;
  bool ready = true, digested = false;
  while (ready && !digested && !queue_.empty() && writing_.size() < most) {
    ready = submit_next(io, now);
    digested = !digests_;
  }
  submit_sync(io, now);
  return ready && digested && !queue_.empty() && writing_.size() < most;
}

// False: the part has to wait.
bool DiskWriter::submit_next(DiskIo& io, TimePoint now) {
  const Queued next = queue_.front();
  Block* block = memory_.find(next.key.block);
  const Part* part = block == nullptr ? nullptr : block->find(next.key.part_id);
  Slot extent;
  DiskIndex::Room room = DiskIndex::Room::kNever;
  if (part != nullptr && part->committed())
    room = index_.reserve(block->key, block->parent, *part, extent);
  else part = nullptr;
  if (room == DiskIndex::Room::kBusy || room == DiskIndex::Room::kLater) return false;
  if (room == DiskIndex::Room::kGranted && !write(io, next, *block, *part, extent, now))
    return false;
  queue_.pop_front();
  if (part == nullptr) skip(next.mark, DiskSkip::kGone);
  else if (room == DiskIndex::Room::kNever) skip(next.mark, DiskSkip::kNoRoom);
  else if (room == DiskIndex::Room::kExists) outstanding_.erase(next.mark);
  end_queued(next);
  return true;
}

bool DiskWriter::write(DiskIo& io, const Queued& next, Block& block, const Part& part,
                       const Slot& extent, TimePoint now) {
  const uint64_t id = last_id_ + 1, bytes = part.slot.bytes;
  uint8_t* const data = pool_ + part.slot.offset;
  // The rest of the last page may have bytes of a former block.
  std::memset(data + bytes, 0, DiskFile::aligned(bytes) - bytes);
  if (!io.submit({id, DiskOp::kWrite, fd_, DiskFile::kDataOffset + extent.offset, data,
                  DiskFile::aligned(bytes)})) {
    index_.give_up(next.key.block, next.key.part_id);
    return false;
  }
  last_id_ = id;
  memory_.pin(block);
  const uint32_t crc = digests_ ? part.crc : crc32c(data, bytes);
  writing_.emplace(id, Writing{next.key, next.mark, &block, extent.generation, crc, bytes, false,
                               false, now});
  return true;
}

void DiskWriter::submit_sync(DiskIo& io, TimePoint now) {
  if (sync_in_flight_ || written_.empty()) return;
  if (!io.submit({last_id_ + 1, DiskOp::kSync, fd_, 0, nullptr, 0})) return;
  sync_id_ = ++last_id_;
  sync_in_flight_ = true;
  sync_since_ = now;
  syncing_.swap(written_);
  // Recorded in the order in which they were put: parents first.
  std::sort(syncing_.begin(), syncing_.end(),
            [](const Writing& a, const Writing& b) { return a.mark < b.mark; });
}

DiskWriter::Done DiskWriter::complete(const DiskCompletion& done) {
  if (sync_in_flight_ && done.id == sync_id_) {
    sync_in_flight_ = false;
    if (done.error != 0) distrust();
    synced_.insert(synced_.end(), syncing_.begin(), syncing_.end());
    syncing_.clear();
    return {true, true};
  }
  const auto found = writing_.find(done.id);
  if (found == writing_.end()) return {};
  Writing one = found->second;
  writing_.erase(found);
  memory_.unpin(*one.block);
  one.block = nullptr;
  if (done.error == 0) counters_.written_bytes += one.bytes;
  if (done.error == 0 && !one.distrusted) written_.push_back(one);
  else drop(one, !one.cancelled);
  return {true, false};
}

// A sync failed: it, or the next one, may have been told of any write that is not synced.
void DiskWriter::distrust() {
  for (const std::vector<Writing>* some : {&syncing_, &written_})
    for (const Writing& one : *some) drop(one, !one.cancelled);
  syncing_.clear();
  written_.clear();
  for (auto& [id, one] : writing_) one.distrusted = true;
}

void DiskWriter::drop(const Writing& one, bool failed) {
  index_.give_up(one.key.block, one.key.part_id);
  if (failed) skip(one.mark, DiskSkip::kFailed);
  else outstanding_.erase(one.mark);
}

bool DiskWriter::record() {
  for (; !synced_.empty(); synced_.pop_front()) {
    const Writing& one = synced_.front();
    if (!index_.may_record() && !one.cancelled) return false;
    const uint64_t sequence =
        one.cancelled ? 0 : index_.record(one.key.block, one.key.part_id, one.generation, one.crc);
    if (sequence == 0) {
      drop(one, false);
    } else {
      ++counters_.stored;
      recorded_.push_back({sequence, one.mark});
    }
  }
  return true;
}

void DiskWriter::advance(uint64_t durable) {
  for (; !recorded_.empty() && recorded_.front().sequence <= durable; recorded_.pop_front())
    outstanding_.erase(recorded_.front().mark);
}

std::optional<TimePoint> DiskWriter::oldest() const {
  std::optional<TimePoint> oldest;
  if (sync_in_flight_) oldest = sync_since_;
  for (const auto& [id, one] : writing_)
    if (!oldest || one.since < *oldest) oldest = one.since;
  return oldest;
}

}  // namespace kv
