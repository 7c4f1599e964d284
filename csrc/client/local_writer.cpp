#include "client/local_writer.h"

#include "base/parallel.h"

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
    const std::vector<Copy> copies = plan(pool, from, request, outcome.statuses);
    std::vector<uint32_t> crcs(copies.size());
    in_parallel(copies.size(), request.threads, [&](size_t i) {
      const auto& [block, slot] = copies[i];
      uint8_t* to = pool.data() + slot.offset;
      crcs[i] = copy_in(to, from, request.indices[block], request.digest);
    });
    for (size_t i = 0; i < copies.size(); ++i) post(request, copies[i], crcs[i]);
    outcome.state = ring_.state();
  }
  ring_.set_writing(false);
  return outcome;
}

// The statuses of the leading blocks, as far as no request is needed, and the slots of those to be
// copied, which are lent no more.
std::vector<LocalWriter::Copy> LocalWriter::plan(const PoolMapping& pool, const Segments& from,
                                                 const Request& request,
                                                 std::vector<uint8_t>& statuses) {
  std::vector<Copy> copies;
  for (uint32_t i = 0; i < request.hashes.count; ++i) {
    const Hash& hash = request.hashes[i];
    if (!may_hang(hash, i == 0 ? request.parent : request.hashes[i - 1])) break;
    const PartKey key{{request.names.spec_id, hash}, request.names.part_ids[request.part]};
    wire::BlockStatus status = wire::BlockStatus::kExists;
    if (!exists(request, key)) {
      if (stock(from.block_bytes) == 0 || copies.size() >= ring_.room()) break;
      if (!pool.holds(slots_.front().offset, from.block_bytes)) break;
      copies.push_back({i, slots_.front()});
      slots_.pop_front();
      status = wire::BlockStatus::kStored;
    }
    statuses.push_back(static_cast<uint8_t>(status));
  }
  return copies;
}

void LocalWriter::post(const Request& request, const Copy& copy, uint32_t crc) {
  const auto& [block, slot] = copy;
  const Hash& parent = block == 0 ? request.parent : request.hashes[block - 1];
  ring_.post({request.hashes[block], parent, slot.offset, slot.generation, crc,
              request.manifest_id, static_cast<uint32_t>(request.part)});
}

}  // namespace kv
