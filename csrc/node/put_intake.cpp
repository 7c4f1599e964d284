#include "node/put_intake.h"

#include "digest/crc32c.h"
#include "node/writes.h"

namespace kv {

PutIntake::PutIntake(NodeState& state, Writes& writes, const Session& session, uint64_t request_id,
                     uint32_t spec_id, const ManifestPart& part, const wire::WriteRequest& request)
    : state_(state), writes_(writes), writer_(session.writer()), transport_(session.stream()),
      has_crcs_(session.digests), request_id_(request_id), spec_id_(spec_id), part_(part),
      parent_(request.parent),
      hashes_(request.hashes.data, request.hashes.data + request.hashes.count) {
  statuses_.reserve(hashes_.size());
}

PutIntake::~PutIntake() {
  if (granted_) writes_.give_back(key(), writer_, slot_);
}

void PutIntake::begin_block() {
  const Hash& parent = block_ == 0 ? parent_ : hashes_[block_ - 1];
  const Table::Reserved reserved =
      writes_.reserve_one(key(), parent, part_.bytes, writer_, no_space_);
  statuses_.push_back(static_cast<uint8_t>(reserved.status));
  granted_ = reserved.status == BlockStatus::kGranted;
  slot_ = reserved.slot;
  at_ = 0, crc_ = 0, begun_ = true;
}

size_t PutIntake::spans(iovec out[2]) {
  if (!begun_) begin_block();
  if (at_ >= part_.bytes) {
    const uint64_t of_line = at_ - part_.bytes;
    out[0] = {line_ + of_line, sizeof line_ - of_line};
    return 1;
  }
  const uint64_t left = part_.bytes - at_;
  uint8_t* const to = granted_ ? state_.pool + slot_.offset + at_ : writes_.scratch().data();
  if (!granted_ && left > writes_.scratch().size()) {
    out[0] = {to, writes_.scratch().size()};
    return 1;
  }
  out[0] = {to, left};
  out[1] = {line_, sizeof line_};
  return 2;
}

void PutIntake::filled(size_t bytes) {
  const uint64_t of_block = at_ < part_.bytes ? std::min<uint64_t>(bytes, part_.bytes - at_) : 0;
  if (granted_ && state_.options.digests && of_block != 0)
    crc_ = crc32c(state_.pool + slot_.offset + at_, of_block, crc_);
  at_ += bytes;
  if (at_ == part_.bytes + sizeof line_) end_block();
}

size_t PutIntake::feed(const uint8_t* data, size_t size) {
  size_t taken = 0;
  while (!done() && taken < size && !state_.turn.over()) {
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
    if (state_.options.digests && has_crcs_) std::memcpy(&crc, line_, sizeof crc);
    const bool intact = crc == crc_;
    statuses_[block_] = static_cast<uint8_t>(intact ? BlockStatus::kStored : BlockStatus::kCorrupt);
    if (intact) writes_.commit_one(key(), writer_, slot_, crc, transport_);
    else writes_.give_back(key(), writer_, slot_), ++state_.counters.corrupt;
  }
  begun_ = false;
  ++block_;
  state_.turn.spend(1);
}

}  // namespace kv
