// RESERVE, COMMIT, ABORT, PUT, and what they and a PUT's payload do block by block.
#include "node/node.h"

namespace kv {

using wire::Status;

namespace {

// The hash that a block of a request hangs on.
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
bool Node::may_reserve(const PartKey& key, const Writer& writer, uint64_t bytes) {
  if (holds_.may_take(writer.client, bytes)) return true;
  Block* const block = table_.find(key.block);
  if (block != nullptr && block->find(key.part_id) != nullptr) return true;
  ++counters_.client_limited;
  return false;
}

Table::Reserved Node::reserve_one(const PartKey& key, const Hash& parent, uint64_t bytes,
                                  const Writer& writer, bool& no_space) {
  // Once there is no space, the rest of a chain would only push out what leads to it.
  if (no_space) return {BlockStatus::kNoSpace, {}};
  Table::Reserved reserved;
  if (may_reserve(key, writer, bytes))
    reserved = table_.reserve(key.block, parent_of(key.block.spec_id, parent), key.part_id, bytes,
                              writer.session, writer.region);
  if (reserved.status == BlockStatus::kGranted) holds_.took(writer.client, bytes);
  no_space = reserved.status == BlockStatus::kNoSpace;
  if (no_space) ++counters_.no_space;
  return reserved;
}

bool Node::commit_one(const PartKey& key, const Writer& writer, const Slot& slot, uint32_t crc,
                      Transport transport) {
  const BlockStatus status =
      table_.commit(key.block, key.part_id, writer.session, slot.generation, crc);
  if (status == BlockStatus::kGone) return false;
  holds_.gave(writer.client, slot.bytes);
  if (status == BlockStatus::kOk) committed(key, slot.bytes, transport);
  return true;
}

void Node::committed(const PartKey& key, uint64_t bytes, Transport transport) {
  ++counters_.commits;
  counters_.bytes_in[transport] += bytes;
  if (disk_ != nullptr) disk_->committed(key.block, key.part_id);
  waits_.committed(key.block);
  land_waits();
  // It may have taken the place of what was being read from the disk.
  if (runs_ != nullptr) end_runs(runs_->changed(key.block));
}

// Nobody writes it any more.
void Node::free_slot(const Writer& writer, const Slot& slot) {
  holds_.gave(writer.client, slot.bytes);
  table_.release(slot);
}

void Node::give_back(const PartKey& key, const Writer& writer, const Slot& slot) {
  if (table_.take_back(key.block, key.part_id, writer.session, slot.generation))
    free_slot(writer, slot);
  ++counters_.aborts;
}

void Node::expire_reservations() {
  const std::chrono::duration<double> timeout(options_.reserve_timeout_s);
  for (const auto& [id, session] : sessions_)
    if (!session->reservations.empty() && now_ - session->heard > timeout)
      expire_reservations(*session);
}

void Node::expire_reservations(Session& session) {
  for (const PartKey& key : std::exchange(session.reservations, {})) {
    const auto slot = table_.take_back(key.block, key.part_id, session.id, std::nullopt);
    if (!slot) continue;
    session.expired.emplace(slot->generation, ExpiredReservation{key, *slot});
    ++counters_.expired;
  }
}

// The client no longer writes the slot of an expired reservation. False where it has none such.
bool Node::free_expired(Session& session, const PartKey& key, uint32_t generation) {
  const auto found = session.expired.find(generation);
  if (found == session.expired.end() || found->second.key != key) return false;
  free_slot(session.writer(), found->second.slot);
  session.expired.erase(found);
  return true;
}

bool Node::reserve(Session& session, const Header& header, const wire::WriteRequest& request) {
  if (!session.writes_pool())
    return fail(session, header, Status::kNotAllowed, "RESERVE needs a writable pool: use PUT");
  const Manifest* manifest = manifest_or_fail(session, header, request.manifest_id);
  if (manifest == nullptr) return true;
  if (request.part >= manifest->parts.size()) return refuse(session, header, "no such part");
  if (!is_chain(request)) return refuse(session, header, "the hashes are not a chain");
  if (session.reservations.size() + session.expired.size() + request.hashes.count >
      kMaxReservations)
    return fail(session, header, Status::kLimit, "too many blocks reserved by this connection");
  return in_turns(session, [=, this, &session, spec_id = manifest->spec_id,
                            part = manifest->parts[request.part], i = 0u,
                            answer = wire::ReserveReply(), no_space = false]() mutable {
    for (; i < request.hashes.count && !turn_.over(); ++i, turn_.spend(1)) {
      const PartKey key{{spec_id, request.hashes[i]}, part.part_id};
      const Table::Reserved one =
          reserve_one(key, parent_at(request, i), part.bytes, session.writer(), no_space);
      if (one.status == BlockStatus::kGranted) session.reservations.insert(key);
      answer.statuses.push_back(static_cast<uint8_t>(one.status));
      answer.offsets.push_back(one.slot.offset);
      answer.generations.push_back(one.slot.generation);
    }
    if (i < request.hashes.count) return false;
    reply(session, header, std::move(answer));
    return true;
  });
}

bool Node::commit(Session& session, const Header& header, const wire::CommitRequest& request) {
  const uint32_t count = request.hashes.count;
  if (request.generations.size() != count || request.crcs.size() != count)
    return refuse(session, header, "one generation and one CRC32C per hash are needed");
  const Manifest* manifest = manifest_or_fail(session, header, request.manifest_id);
  if (manifest == nullptr) return true;
  if (request.part >= manifest->parts.size()) return refuse(session, header, "no such part");
  return in_turns(session, [=, this, &session, spec_id = manifest->spec_id,
                            part = manifest->parts[request.part], i = 0u,
                            answer = wire::StatusesReply()]() mutable {
    for (; i < count && !turn_.over(); ++i, turn_.spend(1)) {
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
    ++counters_.puts;
    reply(session, header, std::move(answer));
    return true;
  });
}

bool Node::abort(Session& session, const Header& header, const wire::AbortRequest& request) {
  if (request.generations.size() != request.hashes.count)
    return refuse(session, header, "one generation per hash is needed");
  const Manifest* manifest = manifest_or_fail(session, header, request.manifest_id);
  if (manifest == nullptr) return true;
  if (request.part >= manifest->parts.size()) return refuse(session, header, "no such part");
  return in_turns(session, [=, this, &session, spec_id = manifest->spec_id,
                            part_id = manifest->parts[request.part].part_id, i = 0u,
                            answer = wire::StatusesReply()]() mutable {
    for (; i < request.hashes.count && !turn_.over(); ++i, turn_.spend(1)) {
      const PartKey key{{spec_id, request.hashes[i]}, part_id};
      std::optional<Slot> slot;
      if (session.reservations.contains(key))
        slot = table_.take_back(key.block, part_id, session.id, request.generations[i]);
      if (slot) {
        free_slot(session.writer(), *slot);
        session.reservations.erase(session.reservations.find(key));
      }
      const bool freed = slot || free_expired(session, key, request.generations[i]);
      counters_.aborts += freed ? 1 : 0;
      answer.statuses.push_back(static_cast<uint8_t>(freed ? BlockStatus::kOk : BlockStatus::kGone));
    }
    if (i < request.hashes.count) return false;
    reply(session, header, std::move(answer));
    return true;
  });
}

// Whatever is wrong with a PUT ends the connection: its payload is on the way and cannot be told
// from the next request.
bool Node::put(Session& session, const Header& header, const wire::WriteRequest& request) {
  const Manifest* manifest = manifest_or_fail(session, header, request.manifest_id);
  if (manifest == nullptr) return false;
  if (request.part >= manifest->parts.size()) return refuse(session, header, "no such part");
  if (!is_chain(request)) return refuse(session, header, "the hashes are not a chain");
  const ManifestPart& part = manifest->parts[request.part];
  if (header.payload_bytes != wire::put_payload_bytes(part.bytes, request.hashes.count))
    return refuse(session, header, "the payload is not one part and its CRC32C per hash");
  session.put = std::make_shared<PutIntake>(*this, session, header.request_id, manifest->spec_id,
                                            part.part_id, part.bytes, request);
  if (session.put->done()) finish_put(session);
  return true;
}

void Node::finish_put(Session& session) {
  Header header;
  header.op = wire::Op::kPut;
  header.request_id = session.put->request_id();
  ++counters_.puts;
  reply(session, header, wire::StatusesReply{session.put->take_statuses()});
  session.put.reset();
}

}  // namespace kv
