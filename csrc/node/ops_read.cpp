// MATCH, ACQUIRE, RELEASE, GET, WAIT, CANCEL.
#include <algorithm>
#include <chrono>

#include "node/node.h"

namespace kv {

using wire::Status;

void Node::count_match(const Session& session, const Found& found, uint32_t asked) {
  counts_of(session).hits += found.blocks;
  counts_of(session).misses += asked - found.blocks;
  counters_.hits[Tier::kMemory] += found.in_memory;
  counters_.misses[Tier::kMemory] += asked - found.in_memory;
  if (disk_ == nullptr) return;
  counters_.hits[Tier::kDisk] += found.blocks - found.in_memory;
  counters_.misses[Tier::kDisk] += asked - found.blocks;
}

// Whether the block is there; then it is counted.
bool Node::find_next(Found& found, const BlockKey& key, const PartIds& parts, bool touch) {
  Block* const block = table_.find_complete(key, parts);
  if (block == nullptr && (disk_ == nullptr || !disk_->has(key, parts))) return false;
  found.last = block;
  if (block != nullptr) {
    if (touch) table_.touch(*block);
    if (found.in_memory++ == found.blocks) ++found.leading_in_memory;
  }
  // Also of what the memory has: else the disk would let go first what is used most.
  if (disk_ != nullptr && touch) disk_->touch(key);
  ++found.blocks;
  return true;
}

// Looks for more of them for as long as the turn lasts. True: all that lead are found.
bool Node::find_more(Found& found, const Manifest& manifest, HashSpan hashes, bool touch) {
  for (; found.blocks < hashes.count; turn_.spend(manifest.parts.size())) {
    if (turn_.over()) return false;
    const BlockKey key{manifest.spec_id, hashes[found.blocks]};
    if (!find_next(found, key, manifest.part_ids, touch)) break;
  }
  return true;
}

uint32_t Node::find(uint32_t spec_id, const PartIds& parts, HashSpan hashes) {
  Found found;
  while (found.blocks < hashes.count &&
         find_next(found, {spec_id, hashes[found.blocks]}, parts, false)) continue;
  return found.blocks;
}

bool Node::match(Session& session, const Header& header, const wire::MatchRequest& request) {
  if (manifest_or_fail(session, header, request.manifest_id) == nullptr) return true;
  return in_turns(session, [=, this, &session, found = Found()]() mutable {
    const Manifest& manifest = *registry_.find(session.tenant, request.manifest_id);
    if (!find_more(found, manifest, request.hashes, true)) return false;
    count_match(session, found, request.hashes.count);
    wire::MatchReply answer{found.blocks, {}};
    const auto place = [&](uint32_t blocks, Tier tier) {
      answer.places.push_back({blocks, options_.node, static_cast<uint8_t>(tier)});
    };
    if (found.leading_in_memory != 0) place(found.leading_in_memory, Tier::kMemory);
    if (found.blocks > found.leading_in_memory) place(found.blocks, Tier::kDisk);
    reply(session, header, std::move(answer));
    if (request.promote != 0) announce(manifest, found, request.hashes);
    return true;
  });
}

bool Node::acquire(Session& session, const Header& header, const wire::ReadRequest& request) {
  const Manifest* manifest = manifest_or_fail(session, header, request.manifest_id);
  if (manifest == nullptr) return true;
  const bool all = request.part == wire::kAllParts;
  if (!all && request.part >= manifest->parts.size())
    return refuse(session, header, "no such part");
  const size_t wanted = all ? manifest->parts.size() : 1;
  if (wanted * request.hashes.count > wire::kMaxSlots ||
      leases_.blocks_of(session.id) + request.hashes.count > kMaxLeasedBlocks)
    return fail(session, header, Status::kLimit,
                "too many blocks in one lease, or leased by this connection");
  return read(session, header, request);
}

bool Node::get(Session& session, const Header& header, const wire::ReadRequest& request) {
  const Manifest* manifest = manifest_or_fail(session, header, request.manifest_id);
  if (manifest == nullptr) return true;
  if (request.part >= manifest->parts.size()) return refuse(session, header, "no such part");
  return read(session, header, request);
}

// ACQUIRE and GET. With a disk they are first looked for: what lies there alone is waited for.
bool Node::read(Session& session, const Header& header, const wire::ReadRequest& request) {
  const bool get = header.op == wire::Op::kGet;
  TurnStep serve = get ? send_run(session, header, request) : give_lease(session, header, request);
  if (disk_ == nullptr) return in_turns(session, std::move(serve));
  return in_turns(session, [=, this, &session, serve = std::move(serve), found = Found(),
                            looking = true]() mutable {
    if (!looking) return serve();
    const Manifest& manifest = *registry_.find(session.tenant, request.manifest_id);
    if (!find_more(found, manifest, request.hashes, false)) return false;
    looking = false;
    if (!get) count_match(session, found, request.hashes.count);
    return fetch_first(session, header, manifest, request, found.leading_in_memory) || serve();
  });
}

// The next block of a leading run, or null: the run has ended, or the turn is over.
Block* Node::next_of(Run& run, const Manifest& manifest, HashSpan hashes) {
  run.ended = run.ended || run.blocks == hashes.count;
  if (run.ended || turn_.over()) return nullptr;
  turn_.spend(manifest.parts.size());
  Block* const block = table_.find_complete({manifest.spec_id, hashes[run.blocks]},
                                            manifest.part_ids);
  run.ended = block == nullptr;
  if (run.ended) return nullptr;
  table_.touch(*block);
  ++run.blocks;
  return block;
}

TurnStep Node::give_lease(Session& session, const Header& header, const wire::ReadRequest& request) {
  return [=, this, &session, run = Run(), answer = wire::AcquireReply()]() mutable {
    const Manifest& manifest = *registry_.find(session.tenant, request.manifest_id);
    const bool all = request.part == wire::kAllParts;
    const std::span<const ManifestPart> wanted =
        all ? std::span(manifest.parts) : std::span(manifest.parts).subspan(request.part, 1);
    // A block is leased only with all parts of the manifest, also where one part is asked for.
    while (Block* block = next_of(run, manifest, request.hashes)) {
      if (answer.lease_id == 0) answer.lease_id = leases_.acquire(session.id, {});
      leases_.add(session.id, answer.lease_id, *block);
      for (const ManifestPart& one : wanted) {
        const Part& part = *block->find(one.part_id);
        answer.offsets.push_back(part.slot.offset);
        answer.generations.push_back(part.slot.generation);
        answer.crcs.push_back(part.crc);
        // Who cannot read the pool gets no bytes.
        if (session.reads_pool()) counters_.bytes_out[session.transport()] += part.slot.bytes;
      }
    }
    if (!run.ended) return false;
    answer.blocks = run.blocks;
    for (const ManifestPart& one : wanted) answer.part_bytes.push_back(one.bytes);
    if (disk_ == nullptr)
      count_match(session, {run.blocks, run.blocks, run.blocks}, request.hashes.count);
    if (!table_.quotas().within_limits(session.tenant)) {
      leases_.release(session.id, answer.lease_id);
      return limit(session, header, "the tenant would hold more blocks than it may");
    }
    reply(session, header, std::move(answer));
    return true;
  };
}

bool Node::release(Session& session, const Header& header, const wire::ReleaseRequest& request) {
  const bool held = leases_.has(session.id, request.lease_id);
  return in_turns(session, [=, this, &session] {
    if (!leases_.release(session.id, request.lease_id, turn_)) return false;
    reply(session, header, wire::FlagReply{held});
    return true;
  });
}

TurnStep Node::send_run(Session& session, const Header& header, const wire::ReadRequest& request) {
  return [=, this, &session, run = Run(), answer = wire::GetReply(),
          pins = std::make_shared<PinnedRun>(table_), payload = std::vector<iovec>()]() mutable {
    const Manifest& manifest = *registry_.find(session.tenant, request.manifest_id);
    const ManifestPart& part = manifest.parts[request.part];
    while (Block* block = next_of(run, manifest, request.hashes)) {
      pins->add(*block);
      const Part& stored = *block->find(part.part_id);
      answer.crcs.push_back(stored.crc);
      payload.push_back({pool_ + stored.slot.offset, part.bytes});
    }
    if (!run.ended) return false;
    if (!table_.quotas().within_limits(session.tenant)) {
      pins.reset();
      return limit(session, header, "the tenant would hold more blocks than it may");
    }
    answer.part_bytes = part.bytes;
    const uint64_t payload_bytes = part.bytes * run.blocks;
    counters_.bytes_out[session.stream()] += payload_bytes;
    queue(session, {wire::encode_frame(header.op, Status::kOk, header.request_id, answer,
                                       payload_bytes),
                    {}, std::move(payload), std::move(pins)});
    return true;
  };
}

bool Node::wait(Session& session, const Header& header, const wire::WaitRequest& request) {
  if (request.upto > request.hashes.count)
    return refuse(session, header, "upto is greater than the number of hashes");
  if (waits_.has(session.id, header.request_id))
    return refuse(session, header, "this request id waits already");
  const Manifest* manifest = manifest_or_fail(session, header, request.manifest_id);
  if (manifest == nullptr) return true;
  if (session.waits >= kMaxWaits || session.wait_hashes + request.upto > kMaxWaitHashes)
    return fail(session, header, Status::kLimit, "too many waits of this connection");
  const TenantCounts& counts = counts_of(session);
  if (counts.waits >= options_.limits.waits ||
      counts.wait_hashes + request.upto > options_.limits.wait_hashes)
    return limit(session, header, "too many waits of this tenant");
  const auto deadline_ms =
      std::chrono::milliseconds(std::min(request.deadline_ms, wire::kMaxDeadlineMs));
  auto wait = std::make_unique<Wait>(
      Wait{session.id, header.request_id, manifest->spec_id, manifest->part_ids,
           std::vector<Hash>(request.hashes.data, request.hashes.data + request.upto),
           request.lease != 0, now_ + deadline_ms, 0, now_});
  count_wait(session, request.upto, true);
  waits_.add(std::move(wait));
  land_waits();
  if (waits_.has(session.id, header.request_id)) call_writers();
  return true;
}

void Node::count_wait(Session& session, uint64_t hashes, bool begins) {
  const uint64_t sign = begins ? 1 : ~uint64_t{0};  // modulo 2^64: minus one
  TenantCounts& counts = counts_of(session);
  session.waits += sign, session.wait_hashes += sign * hashes;
  counts.waits += sign, counts.wait_hashes += sign * hashes;
}

bool Node::cancel(Session& session, const Header& header, const wire::CancelRequest& request) {
  auto wait = waits_.cancel(session.id, request.request_id);
  const bool waited = wait != nullptr;
  if (waited) answer_wait(std::move(wait), Status::kCancelled);
  // The answer to the WAIT goes first, also of one that has just landed.
  const auto ended = std::ranges::find_if(ended_waits_, [&](const EndedWait& one) {
    return one.wait->session == session.id && one.wait->request_id == request.request_id;
  });
  Turn at_once = Turn::endless();
  if (ended != ended_waits_.end() && answer(*ended, at_once)) ended_waits_.erase(ended);
  reply(session, header, wire::FlagReply{waited});
  return true;
}

void Node::land_waits() {
  while (auto wait = waits_.landed(turn_)) land(std::move(wait));
  answer_ended();
}

void Node::land(std::unique_ptr<Wait> wait) {
  // A lease is on blocks in memory.
  if (wait->lease && fetch_landed(wait)) return;
  answer_wait(std::move(wait), Status::kOk);
}

void Node::answer_wait(std::unique_ptr<Wait> wait, Status status) {
  EndedWait ended{std::move(wait), status};
  const Wait& one = *ended.wait;
  const bool leasable = leases_.blocks_of(one.session) + one.hashes.size() <= kMaxLeasedBlocks;
  if (status == Status::kOk && one.lease && leasable && !one.hashes.empty())
    if (Block* end = table_.find_complete({one.spec_id, one.hashes.back()}, one.parts))
      ended.lease_id = leases_.acquire(one.session, {end}), ended.end = end;
  ended_waits_.push_back(std::move(ended));
  answer_ended();
}

void Node::answer_ended() {
  while (!ended_waits_.empty() && !turn_.over() && answer(ended_waits_.front(), turn_))
    ended_waits_.pop_front();
}

// True: it is answered, or its connection has ended.
bool Node::answer(EndedWait& ended, Turn& turn) {
  const Wait& wait = *ended.wait;
  Session* session = find_session(wait.session);
  if (session == nullptr) return true;
  const bool landed = ended.status == Status::kOk;
  Found& found = ended.found;
  for (; found.blocks < wait.hashes.size(); turn.spend(1)) {
    if (turn.over()) return false;
    // What landed counts as used: somebody is about to read it.
    const BlockKey key{wait.spec_id, wait.hashes[found.blocks]};
    if (!find_next(found, key, wait.parts, landed)) break;
    const bool leads = found.blocks == found.leading_in_memory && found.last != ended.end;
    if (ended.lease_id != 0 && leads) leases_.add(wait.session, ended.lease_id, *found.last);
  }
  count_wait(*session, wait.hashes.size(), false);
  wire::WaitReply answer{found.blocks, ended.lease_id};
  const bool within = table_.quotas().within_limits(session->tenant);
  if (ended.lease_id != 0 && (!within || found.blocks == 0)) {
    leases_.release(wait.session, std::exchange(answer.lease_id, 0));
    counts_of(*session).limited += within ? 0 : 1;
  }
  count_landing(wait, ended.status);
  Header header;
  header.op = wire::Op::kWait;
  header.request_id = wait.request_id;
  reply(*session, header, answer, ended.status);
  return true;
}

void Node::count_landing(const Wait& wait, Status status) {
  switch (status) {
    case Status::kOk: {
      const std::chrono::nanoseconds waited = now_ - wait.since;
      counters_.landing_waits.observe(static_cast<uint64_t>(waited.count()));
      ++counters_.landings[Landing::kLanded];
      return;
    }
    case Status::kTimeout: ++counters_.landings[Landing::kTimeout]; return;
    default: ++counters_.landings[Landing::kCancelled]; return;
  }
}

void Node::expire_waits() {
  for (auto& wait : waits_.expired(now_)) answer_wait(std::move(wait), Status::kTimeout);
}

}  // namespace kv
