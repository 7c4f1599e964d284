#include "node/put_intake.h"

#include <algorithm>
#include <cstring>

#include "digest/crc32c.h"
#include "node/node.h"

namespace kv {

PutIntake::PutIntake(Node& node, const Session& session, uint64_t request_id, uint32_t spec_id,
                     uint32_t part_id, uint64_t part_bytes, const wire::WriteRequest& request)
    : node_(node),
      writer_(session.writer()),
      transport_(session.stream()),
      told_(session.digests),
      request_id_(request_id),
      spec_id_(spec_id),
      part_id_(part_id),
      part_bytes_(part_bytes),
      parent_(request.parent),
      hashes_(request.hashes.data, request.hashes.data + request.hashes.count) {
  statuses_.reserve(hashes_.size());
}

PutIntake::~PutIntake() {
  if (granted_) node_.give_back({key(block_), part_id_}, writer_, slot_);
}

void PutIntake::begin_block() {
  const Hash& parent = block_ == 0 ? parent_ : hashes_[block_ - 1];
  const Table::Reserved reserved =
      node_.reserve_one({key(block_), part_id_}, parent, part_bytes_, writer_, no_space_);
  statuses_.push_back(static_cast<uint8_t>(reserved.status));
  granted_ = reserved.status == BlockStatus::kGranted;
  slot_ = reserved.slot;
  at_ = 0, crc_ = 0, begun_ = true;
}

size_t PutIntake::spans(iovec out[2]) {
  if (!begun_) begin_block();
  if (at_ >= part_bytes_) {
    const uint64_t of_trailer = at_ - part_bytes_;
    out[0] = {trailer_ + of_trailer, sizeof trailer_ - of_trailer};
    return 1;
  }
  const uint64_t left = part_bytes_ - at_;
  if (!granted_ && left > node_.scratch().size()) {
    out[0] = {node_.scratch().data(), node_.scratch().size()};
    return 1;
  }
  out[0] = {granted_ ? node_.pool_data() + slot_.offset + at_ : node_.scratch().data(), left};
  out[1] = {trailer_, sizeof trailer_};
  return 2;
}

void PutIntake::filled(size_t bytes) {
  const uint64_t of_block = at_ < part_bytes_ ? std::min<uint64_t>(bytes, part_bytes_ - at_) : 0;
  if (granted_ && node_.digests() && of_block != 0)
    crc_ = crc32c(node_.pool_data() + slot_.offset + at_, of_block, crc_);
  at_ += bytes;
  if (at_ == part_bytes_ + sizeof trailer_) end_block();
}

size_t PutIntake::feed(const uint8_t* data, size_t size) {
  size_t taken = 0;
  while (!done() && taken < size && !node_.turn_is_over()) {
    iovec at[2];
    const size_t count = spans(at);
    size_t now = 0;
    for (size_t i = 0; i < count && taken + now < size; ++i) {
      const size_t bytes = std::min(size - taken - now, at[i].iov_len);
      std::memcpy(at[i].iov_base, data + taken + now, bytes);
      now += bytes;
    }
    filled(now);
    taken += now;
  }
  return taken;
}

void PutIntake::end_block() {
  if (granted_) {
    granted_ = false;
    uint32_t crc = crc_;
    if (node_.digests() && told_) std::memcpy(&crc, trailer_, sizeof crc);
    const bool intact = crc == crc_;
    statuses_[block_] = static_cast<uint8_t>(intact ? BlockStatus::kStored : BlockStatus::kCorrupt);
    const PartKey part{key(block_), part_id_};
    if (intact) node_.commit_one(part, writer_, slot_, crc, transport_);
    else node_.give_back(part, writer_, slot_), node_.count_corrupt();
  }
  begun_ = false;
  ++block_;
  node_.spend(1);
}

}  // namespace kv
