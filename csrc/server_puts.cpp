// A PUT of a single block after another one like it: frame and payload in one receive.
#include <algorithm>

#include "put_intake.h"
#include "server.h"

namespace kv {

using wire::HeaderError;
using wire::Op;

namespace {

// Asked for along with what is expected: where nothing comes after it, as a rule, no other read has
// to find that out.
constexpr size_t kBeyondBytes = 16u << 10;

// Whether this begins with a PUT of so many bytes in all, and is not to be looked at otherwise.
bool is_put(const Input& input, size_t frame_bytes, uint64_t payload_bytes) {
  wire::Header header;
  return input.size() >= wire::kHeaderBytes &&
         wire::read_header(input.data(), header) == HeaderError::kNone && header.op == Op::kPut &&
         wire::kHeaderBytes + header.body_bytes == frame_bytes &&
         header.payload_bytes == payload_bytes;
}

}  // namespace

// What turns out not to be the block is copied to where it belongs: a guess costs that copy.
IoState Server::read_alike(Session& session, const Slot& spare, size_t& budget) {
  const size_t frame = session.last_put_frame, after = wire::kLineBytes + kBeyondBytes;
  uint8_t* const room = session.input.room(frame + after);
  iovec spans[] = {{room, frame},
                   {node_->pool_data() + spare.offset, spare.bytes},
                   {room + frame, after}};
  size_t received = 0;
  const IoState state = session.receive_into(spans, std::size(spans), received);
  if (received != 0) session.input_progress(node_->now());
  budget -= std::min(budget, received);
  session.drained = state == IoState::kOpen && received < frame + spare.bytes + after;
  if (!begins_in(session, spare, received, budget)) node_->drop(spare);
  return state;
}

// Whether the slot is a block's now.
bool Server::begins_in(Session& session, const Slot& spare, size_t received, size_t& budget) {
  const size_t frame = std::min(received, session.last_put_frame);
  const size_t of_slot = std::min<size_t>(received - frame, spare.bytes);
  session.input.added(received - of_slot);
  if (of_slot == 0) return false;
  size_t at = frame;
  // Any other request is handled when the slot has been given back: it may need the room.
  if (is_put(session.input, frame, wire::put_payload_bytes(spare.bytes, 1))) {
    size_t missing = 0;
    take_frame(session, budget, missing);
    if (session.put != nullptr && session.put->sole_bytes() == spare.bytes)
      return session.put->begin_in(spare, of_slot);
    at = 0;
  }
  session.input.insert(at, node_->pool_data() + spare.offset, of_slot);
  return false;
}

}  // namespace kv
