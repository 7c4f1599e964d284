#include "node/writes.h"

#include "node/put_intake.h"

namespace kv {

using wire::Header;
using wire::Status;

namespace {

constexpr size_t kScratchBytes = 256u << 10;

// The parent of a block of a request.
const Hash& parent_at(const wire::WriteRequest& request, uint32_t block) {
  return block == 0 ? request.parent : request.hashes[block - 1];
}

bool is_chain(const wire::WriteRequest& request) {
  for (uint32_t i = 0; i < request.hashes.count; ++i)
    if (!may_hang(request.hashes[i], parent_at(request, i))) return false;
  return true;
}

}  // namespace

// Whether the client may have a slot for it, or needs none.
bool Writes::may_reserve(const PartKey& key, const Writer& writer, uint64_t bytes) {
  if (state_.holds.may_take(writer.client, bytes)) return true;
  Block* const block = state_.table.find(key.block);
  if (block != nullptr && block->find(key.part_id) != nullptr) return true;
  ++state_.counters.client_limited;
  return false;
}

Table::Reserved Writes::reserve_one(const PartKey& key, const Hash& parent, uint64_t bytes,
                                    const Writer& writer, bool& no_space) {
  // Once there is no space, the rest of a chain would only evict what leads to it.
  if (no_space) return {BlockStatus::kNoSpace, {}};
  Table::Reserved reserved;
  if (may_reserve(key, writer, bytes))
    reserved = state_.table.reserve(key.block, parent_of(key.block.spec_id, parent), key.part_id,
                                    bytes, writer.session, writer.region);
  if (reserved.status == BlockStatus::kGranted) state_.holds.took(writer.client, bytes);
  no_space = reserved.status == BlockStatus::kNoSpace;
  if (no_space) ++state_.counters.no_space;
  return reserved;
}

bool Writes::commit_one(const PartKey& key, const Writer& writer, const Slot& slot, uint32_t crc,
                        Transport transport) {
  const BlockStatus status =
      state_.table.commit(key.block, key.part_id, writer.session, slot.generation, crc);
  if (status == BlockStatus::kGone) return false;
  state_.holds.gave(writer.client, slot.bytes);
  if (status == BlockStatus::kOk) committed(key, slot.bytes, transport);
  return true;
}

void Writes::committed(const PartKey& key, uint64_t bytes, Transport transport) {
  ++state_.counters.commits;
  state_.counters.bytes_in[transport] += bytes;
  promotion_.committed(key);
  landings_.committed(key.block);
}

void Writes::free_slot(const Writer& writer, const Slot& slot) {
  state_.holds.gave(writer.client, slot.bytes);
  state_.table.release(slot);
}

void Writes::give_back(const PartKey& key, const Writer& writer, const Slot& slot) {
  if (state_.table.take_back(key.block, key.part_id, writer.session, slot.generation))
    free_slot(writer, slot);
  ++state_.counters.aborts;
}

void Writes::expire_reservations() {
  const std::chrono::duration<double> timeout(state_.options.reserve_timeout_s);
  for (const auto& [id, session] : state_.sessions)
    if (!session->reservations.empty() && state_.now - session->active_at > timeout)
      expire(*session);
}

void Writes::expire(Session& session) {
  for (const PartKey& key : std::exchange(session.reservations, {})) {
    const auto slot = state_.table.take_back(key.block, key.part_id, session.id, std::nullopt);
    if (!slot) continue;
    session.expired.emplace(slot->generation, ExpiredReservation{key, *slot});
    ++state_.counters.expired;
  }
}

// The client does not write the slot of an expired reservation any more. False: it has none such.
bool Writes::free_expired(Session& session, const PartKey& key, uint32_t generation) {
  const auto found = session.expired.find(generation);
  if (found == session.expired.end() || found->second.key != key) return false;
  free_slot(session.writer(), found->second.slot);
  session.expired.erase(found);
  return true;
}

std::vector<Slot> Writes::take_slots(Session& session) {
  std::vector<Slot> slots;
  for (const PartKey& key : std::exchange(session.reservations, {}))
    if (const auto slot = state_.table.take_back(key.block, key.part_id, session.id, std::nullopt))
      slots.push_back(*slot);
  for (const auto& [generation, one] : std::exchange(session.expired, {}))
    slots.push_back(one.slot);
  return slots;
}

std::vector<uint8_t>& Writes::scratch() {
  if (scratch_.empty()) scratch_.resize(kScratchBytes);
  return scratch_;
}

bool Writes::reserve(Session& session, const Header& header, const wire::WriteRequest& request) {
  if (!session.writes_pool())
    return replies_.fail(session, header, Status::kNotAllowed,
                         "RESERVE needs a writable pool: use PUT");
  const Manifest* manifest = replies_.manifest_or_fail(session, header, request.manifest_id);
  if (manifest == nullptr) return true;
  if (request.part >= manifest->parts.size())
    return replies_.refuse(session, header, "no such part");
  if (!is_chain(request)) return replies_.refuse(session, header, "the hashes are not a chain");
  if (session.reservations.size() + session.expired.size() + request.hashes.count >
      kMaxReservations)
    return replies_.fail(session, header, Status::kLimit,
                         "too many blocks reserved by this connection");
  return in_turns(session, [=, this, &session, spec_id = manifest->spec_id,
                            part = manifest->parts[request.part], i = 0u,
                            answer = wire::ReserveReply(), no_space = false]() mutable {
    for (; i < request.hashes.count && !state_.turn.over(); ++i, state_.turn.spend(1)) {
      const PartKey key{{spec_id, request.hashes[i]}, part.part_id};
      const Table::Reserved one =
          reserve_one(key, parent_at(request, i), part.bytes, session.writer(), no_space);
      if (one.status == BlockStatus::kGranted) session.reservations.insert(key);
      answer.statuses.push_back(static_cast<uint8_t>(one.status));
      answer.offsets.push_back(one.slot.offset);
      answer.generations.push_back(one.slot.generation);
    }
    if (i < request.hashes.count) return false;
    replies_.send(session, header, std::move(answer));
    return true;
  });
}

bool Writes::commit(Session& session, const Header& header, const wire::CommitRequest& request) {
  const uint32_t count = request.hashes.count;
  if (request.generations.size() != count || request.crcs.size() != count)
    return replies_.refuse(session, header, "one generation and one CRC32C per hash are needed");
  const Manifest* manifest = replies_.manifest_or_fail(session, header, request.manifest_id);
  if (manifest == nullptr) return true;
  if (request.part >= manifest->parts.size())
    return replies_.refuse(session, header, "no such part");
  return in_turns(session, [=, this, &session, spec_id = manifest->spec_id,
                            part = manifest->parts[request.part], i = 0u,
                            answer = wire::StatusesReply()]() mutable {
    for (; i < count && !state_.turn.over(); ++i, state_.turn.spend(1)) {
      const PartKey key{{spec_id, request.hashes[i]}, part.part_id};
      const bool done =
          session.reservations.contains(key) &&
          commit_one(key, session.writer(), {0, part.bytes, request.generations[i], 0},
                     request.crcs[i], session.transport());
      if (done) session.reservations.erase(session.reservations.find(key));
      else free_expired(session, key, request.generations[i]);
      answer.statuses.push_back(static_cast<uint8_t>(done ? BlockStatus::kOk : BlockStatus::kGone));
    }
    if (i < count) return false;
    ++state_.counters.puts;
    replies_.send(session, header, std::move(answer));
    return true;
  });
}

bool Writes::abort(Session& session, const Header& header, const wire::AbortRequest& request) {
  const uint32_t count = request.hashes.count;
  if (request.generations.size() != count)
    return replies_.refuse(session, header, "one generation per hash is needed");
  const Manifest* manifest = replies_.manifest_or_fail(session, header, request.manifest_id);
  if (manifest == nullptr) return true;
  if (request.part >= manifest->parts.size())
    return replies_.refuse(session, header, "no such part");
  return in_turns(session, [=, this, &session, spec_id = manifest->spec_id,
                            part_id = manifest->parts[request.part].part_id, i = 0u,
                            answer = wire::StatusesReply()]() mutable {
    for (; i < count && !state_.turn.over(); ++i, state_.turn.spend(1)) {
      const PartKey key{{spec_id, request.hashes[i]}, part_id};
      std::optional<Slot> slot;
      if (session.reservations.contains(key))
        slot = state_.table.take_back(key.block, part_id, session.id, request.generations[i]);
      if (slot) {
        free_slot(session.writer(), *slot);
        session.reservations.erase(session.reservations.find(key));
      }
      const bool freed = slot || free_expired(session, key, request.generations[i]);
      state_.counters.aborts += freed ? 1 : 0;
      answer.statuses.push_back(
          static_cast<uint8_t>(freed ? BlockStatus::kOk : BlockStatus::kGone));
    }
    if (i < count) return false;
    replies_.send(session, header, std::move(answer));
    return true;
  });
}

// Any error ends the connection: its payload follows, which would be taken for the next request.
bool Writes::put(Session& session, const Header& header, const wire::WriteRequest& request) {
  const Manifest* manifest = replies_.manifest_or_fail(session, header, request.manifest_id);
  if (manifest == nullptr) return false;
  if (request.part >= manifest->parts.size())
    return replies_.refuse(session, header, "no such part");
  if (!is_chain(request)) return replies_.refuse(session, header, "the hashes are not a chain");
  const ManifestPart& part = manifest->parts[request.part];
  if (header.payload_bytes != wire::put_payload_bytes(part.bytes, request.hashes.count))
    return replies_.refuse(session, header, "the payload is not one part and its CRC32C per hash");
  session.put = std::make_shared<PutIntake>(state_, *this, session, header.request_id,
                                            manifest->spec_id, part, request);
  if (session.put->done()) finish_put(session);
  return true;
}

void Writes::finish_put(Session& session) {
  ++state_.counters.puts;
  replies_.send(session, {.op = wire::Op::kPut, .request_id = session.put->request_id()},
                wire::StatusesReply{session.put->take_statuses()});
  session.put.reset();
}

}  // namespace kv
