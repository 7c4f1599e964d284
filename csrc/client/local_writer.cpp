#include "client/local_writer.h"

namespace kv {

LocalWriter::LocalWriter(std::shared_ptr<LocalReader> reader)
    : reader_(std::move(reader)), ring_(reader_->notes() + NotesLayout::kPuts) {}

void LocalWriter::lent(uint64_t bytes, size_t most, const std::vector<uint64_t>& offsets,
                       const std::vector<uint32_t>& generations) {
  bytes_ = bytes;
  most_ = most;
  slots_.clear();
  for (size_t i = 0; i < offsets.size(); ++i) slots_.push_back({offsets[i], generations[i]});
}

// In this order: the node publishes a part in the directory before it marks its post as taken.
bool LocalWriter::exists(const Request& request, const PartKey& key) {
  const auto part = static_cast<uint32_t>(request.part);
  return ring_.pending(request.manifest_id, part, key.block.hash) || reader_->keep(key);
}

LocalWriter::Outcome LocalWriter::put(const PoolMapping& pool, const Segments& from,
                                      const Request& request) {
  Outcome outcome;
  ring_.set_writing(true);
  outcome.state = ring_.state();
  if (outcome.state != PutRing::State::kClosed) {
    while (put_next(pool, from, request, outcome.statuses)) {
    }
    outcome.state = ring_.state();
  }
  ring_.set_writing(false);
  return outcome;
}

// False: the rest needs a request.
bool LocalWriter::put_next(const PoolMapping& pool, const Segments& from, const Request& request,
                           std::vector<uint8_t>& statuses) {
  const size_t i = statuses.size();
  if (i == request.hashes.count) return false;
  const Hash& hash = request.hashes[i];
  const Hash& parent = i == 0 ? request.parent : request.hashes[i - 1];
  if (!may_hang(hash, parent)) return false;
  const PartKey key{{request.names.spec_id, hash}, request.names.part_ids[request.part]};
  wire::BlockStatus status = wire::BlockStatus::kExists;
  if (!exists(request, key)) {
    if (stock(from.block_bytes) == 0 || ring_.full()) return false;
    const Lent slot = slots_.front();
    if (!pool.holds(slot.offset, from.block_bytes)) return false;
    const uint32_t crc =
        copy_in(pool.data() + slot.offset, from, request.indices[i], request.digest);
    slots_.pop_front();
    ring_.post({hash, parent, slot.offset, slot.generation, crc, request.manifest_id,
                static_cast<uint32_t>(request.part)});
    status = wire::BlockStatus::kStored;
  }
  statuses.push_back(static_cast<uint8_t>(status));
  return true;
}

}  // namespace kv
