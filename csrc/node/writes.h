// RESERVE, COMMIT, ABORT, PUT: slots that clients fill, and what may be written at a time.
#pragma once

#include "node/landings.h"
#include "node/promotion.h"
#include "node/replies.h"

namespace kv {

class Writes {
 public:
  static constexpr size_t kMaxReservations = 65536;  // per connection

  Writes(NodeState& state, Replies& replies, Landings& landings, Promotion& promotion)
      : state_(state), replies_(replies), landings_(landings), promotion_(promotion) {}

  bool reserve(Session& session, const wire::Header& header, const wire::WriteRequest& request);
  bool commit(Session& session, const wire::Header& header, const wire::CommitRequest& request);
  bool abort(Session& session, const wire::Header& header, const wire::AbortRequest& request);
  // Begins a PUT: session.put takes its payload.
  bool put(Session& session, const wire::Header& header, const wire::WriteRequest& request);
  // Queues the reply of a PUT whose payload has come in full.
  void finish_put(Session& session);

  // One part of one block, of whatever request. `no_space` is kept from block to block.
  Table::Reserved reserve_one(const PartKey& key, const Hash& parent, uint64_t bytes,
                              const Writer& writer, bool& no_space);
  // False: `writer` has no such reservation any more.
  bool commit_one(const PartKey& key, const Writer& writer, const Slot& slot, uint32_t crc,
                  Transport transport);
  // Ends a reservation whose slot is not written any more.
  void give_back(const PartKey& key, const Writer& writer, const Slot& slot);
  // A part is in memory: tells the disk and those who wait for it.
  void committed(const PartKey& key, uint64_t bytes, Transport transport);
  // A slot that a client had, and does not write any more.
  void free_slot(const Writer& writer, const Slot& slot);

  // Ends the reservations of connections that have been silent for too long: others may write these
  // blocks. The slots stay the connection's until its COMMIT, its ABORT, or its end.
  void expire_reservations();
  // All slots that a connection which ends may still be writing; they are not its any more.
  std::vector<Slot> take_slots(Session& session);

  // A buffer for bytes that are not stored. Allocated when it is first needed.
  std::vector<uint8_t>& scratch();

 private:
  bool may_reserve(const PartKey& key, const Writer& writer, uint64_t bytes);
  void expire(Session& session);
  bool free_expired(Session& session, const PartKey& key, uint32_t generation);

  NodeState& state_;
  Replies& replies_;
  Landings& landings_;
  Promotion& promotion_;
  std::vector<uint8_t> scratch_;
};

}  // namespace kv
