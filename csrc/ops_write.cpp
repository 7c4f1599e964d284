// RESERVE, COMMIT, ABORT, PUT, and what they and a PUT's payload do block by block.
#include "node.h"

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

Table::Reserved Node::reserve_one(const PartKey& key, const Hash& parent, uint64_t bytes,
                                  uint64_t session, uint32_t region, bool& no_space,
                                  const Slot* spare) {
  // Once there is no space, the rest of a chain would only push out what leads to it.
  if (no_space) return {BlockStatus::kNoSpace, {}};
  const Table::Reserved reserved =
      table_.reserve(key.block, parent_of(key.block.spec_id, parent), key.part_id, bytes, session,
                     region, spare);
  no_space = reserved.status == BlockStatus::kNoSpace;
  if (no_space) ++counters_.no_space;
  return reserved;
}

bool Node::commit_one(const PartKey& key, uint64_t session, const Slot& slot, uint32_t crc,
                      Transport transport, Digest digest) {
  const BlockStatus status =
      table_.commit(key.block, key.part_id, session, slot.generation, crc, digest);
  if (status == BlockStatus::kOk) committed(key, slot.bytes, transport);
  return status != BlockStatus::kGone;
}

void Node::committed(const PartKey& key, uint64_t bytes, Transport transport) {
  ++counters_.commits;
  counters_.bytes_in[transport] += bytes;
  if (disk_ != nullptr) disk_->committed(key.block, key.part_id);
  for (auto& landed : waits_.committed(key.block)) land(std::move(landed));
  // It may have taken the place of what was being read from the disk.
  if (runs_ != nullptr) end_runs(runs_->changed(key.block));
}

void Node::give_back(const PartKey& key, uint64_t session, const Slot& slot) {
  if (table_.take_back(key.block, key.part_id, session, slot.generation)) table_.release(slot);
  ++counters_.aborts;
}

bool Node::reserve(Session& session, const Header& header, const wire::WriteRequest& request) {
  if (!session.writes_pool())
    return fail(session, header, Status::kNotAllowed, "RESERVE needs a writable pool: use PUT");
  const Manifest* manifest = manifest_or_fail(session, header, request.manifest_id);
  if (manifest == nullptr) return true;
  if (request.part >= manifest->parts.size()) return refuse(session, header, "no such part");
  if (!is_chain(request)) return refuse(session, header, "the hashes are not a chain");
  if (session.reservations.size() + request.hashes.count > kMaxReservations)
    return fail(session, header, Status::kLimit, "too many blocks reserved by this connection");
  const ManifestPart& part = manifest->parts[request.part];
  wire::ReserveReply answer;
  bool no_space = false;
  for (uint32_t i = 0; i < request.hashes.count; ++i) {
    const PartKey key{{manifest->spec_id, request.hashes[i]}, part.part_id};
    const Table::Reserved one =
        reserve_one(key, parent_at(request, i), part.bytes, session.id, session.region, no_space);
    if (one.status == BlockStatus::kGranted) session.reservations.insert(key);
    answer.statuses.push_back(static_cast<uint8_t>(one.status));
    answer.offsets.push_back(one.slot.offset);
    answer.generations.push_back(one.slot.generation);
  }
  reply(session, header, std::move(answer));
  return true;
}

bool Node::commit(Session& session, const Header& header, const wire::CommitRequest& request) {
  const uint32_t count = request.hashes.count;
  if (request.generations.size() != count || request.crcs.size() != count)
    return refuse(session, header, "one generation and one CRC32C per hash are needed");
  const Manifest* manifest = manifest_or_fail(session, header, request.manifest_id);
  if (manifest == nullptr) return true;
  if (request.part >= manifest->parts.size()) return refuse(session, header, "no such part");
  const ManifestPart& part = manifest->parts[request.part];
  wire::StatusesReply answer;
  for (uint32_t i = 0; i < count; ++i) {
    const PartKey key{{manifest->spec_id, request.hashes[i]}, part.part_id};
    const bool done =
        session.reservations.contains(key) &&
        commit_one(key, session.id, {0, part.bytes, request.generations[i]}, request.crcs[i],
                   session.transport());
    if (done) session.reservations.erase(session.reservations.find(key));
    answer.statuses.push_back(static_cast<uint8_t>(done ? BlockStatus::kOk : BlockStatus::kGone));
  }
  ++counters_.puts;
  reply(session, header, std::move(answer));
  return true;
}

bool Node::abort(Session& session, const Header& header, const wire::AbortRequest& request) {
  if (request.generations.size() != request.hashes.count)
    return refuse(session, header, "one generation per hash is needed");
  const Manifest* manifest = manifest_or_fail(session, header, request.manifest_id);
  if (manifest == nullptr) return true;
  if (request.part >= manifest->parts.size()) return refuse(session, header, "no such part");
  const uint32_t part_id = manifest->parts[request.part].part_id;
  wire::StatusesReply answer;
  for (uint32_t i = 0; i < request.hashes.count; ++i) {
    const PartKey key{{manifest->spec_id, request.hashes[i]}, part_id};
    std::optional<Slot> slot;
    if (session.reservations.contains(key))
      slot = table_.take_back(key.block, part_id, session.id, request.generations[i]);
    if (slot) {
      table_.release(*slot);
      session.reservations.erase(session.reservations.find(key));
      ++counters_.aborts;
    }
    answer.statuses.push_back(static_cast<uint8_t>(slot ? BlockStatus::kOk : BlockStatus::kGone));
  }
  reply(session, header, std::move(answer));
  return true;
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
  session.put = std::make_unique<PutIntake>(*this, session, header.request_id, manifest->spec_id,
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
