// The payload of one PUT while it arrives: received into slots, digested, committed block by block.
#pragma once

#include <sys/uio.h>

#include "node/state.h"

namespace kv {

class Writes;

// A block's slot is reserved when its first byte is due. It is committed when all its bytes have
// come and, if digests are checked, agree with the client's CRC32C. The bytes of blocks that get no
// slot are dropped. The destructor frees the slot of an unfinished block.
class PutIntake {
 public:
  // `request` has been checked against the manifest whose part this is.
  PutIntake(NodeState& state, Writes& writes, const Session& session, uint64_t request_id,
            uint32_t spec_id, const ManifestPart& part, const wire::WriteRequest& request);
  ~PutIntake();
  PutIntake(const PutIntake&) = delete;
  PutIntake& operator=(const PutIntake&) = delete;

  bool done() const { return block_ == hashes_.size(); }
  // Its last block is arriving.
  bool at_last() const { return block_ + 1 == hashes_.size(); }
  // Where the next bytes belong (at most two spans); not when done().
  size_t spans(iovec out[2]);
  // The first `bytes` of the spans have been filled.
  void filled(size_t bytes);
  // Copies bytes that were received elsewhere, as many as this turn allows. Returns how many.
  size_t feed(const uint8_t* data, size_t size);

  uint64_t request_id() const { return request_id_; }
  // Time that the server has spent on it.
  void add_time(std::chrono::nanoseconds spent) { spent_ += spent; }
  std::chrono::nanoseconds spent() const { return spent_; }
  std::vector<uint8_t> take_statuses() { return std::move(statuses_); }

 private:
  void begin_block();
  void end_block();
  PartKey key() const { return {{spec_id_, hashes_[block_]}, part_.part_id}; }

  NodeState& state_;
  Writes& writes_;
  const Writer writer_;
  const Transport transport_;
  const bool has_crcs_;  // the client sends digests
  const uint64_t request_id_;
  const uint32_t spec_id_;
  const ManifestPart part_;
  const Hash parent_;
  const std::vector<Hash> hashes_;
  std::vector<uint8_t> statuses_;
  bool no_space_ = false;
  std::chrono::nanoseconds spent_{0};

  size_t block_ = 0;
  bool begun_ = false;    // the current block has been looked up
  bool granted_ = false;  // it has a slot
  Slot slot_;
  uint64_t at_ = 0;                      // bytes of the block and its line that have come
  uint32_t crc_ = 0;                     // of the bytes in the slot
  uint8_t line_[wire::kLineBytes] = {};  // begins with the client's CRC32C
};

}  // namespace kv
