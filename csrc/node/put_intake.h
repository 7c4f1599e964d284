// The payload of one PUT while it arrives: straight into slots, digested, committed block by block.
#pragma once

#include <sys/uio.h>

#include <chrono>
#include <cstdint>
#include <vector>

#include "net/session.h"
#include "table/table.h"
#include "wire/wire.h"

namespace kv {

class Node;

// A block's slot is reserved when its first byte is due. It is committed when all of it has come and,
// where digests are checked and the peer tells one, that agrees. Bytes of blocks that get no slot are
// read and dropped. What is not committed when this goes is freed: only this ever writes there.
class PutIntake {
 public:
  // `request` has been checked against the manifest; `part_bytes` are of each block.
  PutIntake(Node& node, const Session& session, uint64_t request_id, uint32_t spec_id,
            uint32_t part_id, uint64_t part_bytes, const wire::WriteRequest& request);
  ~PutIntake();
  PutIntake(const PutIntake&) = delete;
  PutIntake& operator=(const PutIntake&) = delete;

  bool done() const { return block_ == hashes_.size(); }
  // Its last block is on the way.
  bool at_last() const { return block_ + 1 == hashes_.size(); }
  // Where the next bytes belong (at most two spans); not when done().
  size_t spans(iovec out[2]);
  // The first `bytes` of the spans have been filled.
  void filled(size_t bytes);
  // Takes what it can, in this turn, of bytes that were received elsewhere; returns how many.
  size_t feed(const uint8_t* data, size_t size);

  uint64_t request_id() const { return request_id_; }
  // Time that the server has spent on it.
  void add_time(std::chrono::nanoseconds spent) { spent_ += spent; }
  std::chrono::nanoseconds spent() const { return spent_; }
  std::vector<uint8_t> take_statuses() { return std::move(statuses_); }

 private:
  void begin_block();
  void end_block();
  BlockKey key(size_t block) const { return {spec_id_, hashes_[block]}; }

  Node& node_;
  Writer writer_;
  Transport transport_;
  bool told_;  // the peer sends digests
  uint64_t request_id_;
  uint32_t spec_id_;
  uint32_t part_id_;
  uint64_t part_bytes_;
  Hash parent_;
  std::vector<Hash> hashes_;
  std::vector<uint8_t> statuses_;
  bool no_space_ = false;
  std::chrono::nanoseconds spent_{0};

  size_t block_ = 0;
  bool begun_ = false;    // the current block has been looked up
  bool granted_ = false;  // it has a slot
  Slot slot_;
  uint64_t at_ = 0;          // bytes of the block and its trailer that have come
  uint32_t crc_ = 0;         // of the bytes in the slot
  uint8_t trailer_[wire::kLineBytes] = {};  // begins with the CRC32C that the client sent
};

}  // namespace kv
