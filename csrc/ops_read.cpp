// MATCH, ACQUIRE, RELEASE, GET, WAIT, CANCEL.
#include <algorithm>
#include <chrono>

#include "crc32c.h"
#include "node.h"

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

Node::Found Node::find(uint32_t spec_id, const PartIds& parts, HashSpan hashes, bool touch) {
  Found found;
  found.blocks = table_.match(spec_id, parts, hashes, touch);
  found.leading_in_memory = found.in_memory = found.blocks;
  // Else the disk would let go first what is used most: that is seldom asked of it.
  for (uint32_t i = 0; disk_ != nullptr && touch && i < found.blocks; ++i)
    disk_->touch({spec_id, hashes[i]});
  for (; disk_ != nullptr && found.blocks < hashes.count; ++found.blocks) {
    const BlockKey key{spec_id, hashes[found.blocks]};
    if (Block* block = table_.find_complete(key, parts)) {
      if (touch) table_.touch(*block);
      ++found.in_memory;
    } else if (!disk_->has(key, parts)) {
      break;
    } else if (touch) {
      disk_->touch(key);
    }
  }
  return found;
}

std::vector<Block*> Node::leading_run(uint32_t spec_id, const PartIds& parts, HashSpan hashes) {
  std::vector<Block*> run;
  for (uint32_t i = 0; i < hashes.count; ++i) {
    Block* block = table_.find_complete({spec_id, hashes[i]}, parts);
    if (block == nullptr) break;
    table_.touch(*block);
    run.push_back(block);
  }
  return run;
}

bool Node::match(Session& session, const Header& header, const wire::MatchRequest& request) {
  const Manifest* manifest = manifest_or_fail(session, header, request.manifest_id);
  if (manifest == nullptr) return true;
  const Found found = find(manifest->spec_id, manifest->part_ids, request.hashes, true);
  count_match(session, found, request.hashes.count);
  wire::MatchReply answer{found.blocks, {}};
  const auto place = [&](uint32_t blocks, Tier tier) {
    answer.places.push_back({blocks, options_.node, static_cast<uint8_t>(tier)});
  };
  if (found.leading_in_memory != 0) place(found.leading_in_memory, Tier::kMemory);
  if (found.blocks > found.leading_in_memory) place(found.blocks, Tier::kDisk);
  reply(session, header, std::move(answer));
  if (request.promote != 0) announce(*manifest, found, request.hashes);
  return true;
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
  if (disk_ != nullptr)
    count_match(session, find(manifest->spec_id, manifest->part_ids, request.hashes, false),
                request.hashes.count);
  return fetch_first(session, header, *manifest, request) ||
         give_lease(session, header, *manifest, request);
}

// Who reads in place sees what it trusts to have been checked; who is sent a copy is sent its digest.
// A run ends before what is not whole.
void Node::keep_digested(std::vector<Block*>& run, std::span<const uint32_t> parts, bool in_place) {
  uint64_t bytes = 0;
  for (size_t i = 0; i < run.size(); ++i) {
    for (const uint32_t part_id : parts) {
      Part& part = *run[i]->find(part_id);
      if (part.digest == Digest::kChecked || (part.digest == Digest::kTold && !in_place)) continue;
      // Everybody else waits meanwhile.
      if (bytes != 0 && bytes + part.slot.bytes > kMostCheckedBytes) return run.resize(i);
      bytes += part.slot.bytes;
      const uint32_t crc = crc32c(pool_ + part.slot.offset, part.slot.bytes);
      if (part.digest == Digest::kUnknown || crc == part.crc) {
        table_.passed(*run[i], part, crc);
        continue;
      }
      ++counters_.corrupt;
      forget(run[i]->key);
      return run.resize(i);
    }
  }
}

bool Node::give_lease(Session& session, const Header& header, const Manifest& manifest,
                      const wire::ReadRequest& request) {
  const bool all = request.part == wire::kAllParts;
  const size_t wanted = all ? manifest.parts.size() : 1;
  // A block is leased only with all parts of the manifest, also where one part is asked for.
  std::vector<Block*> run = leading_run(manifest.spec_id, manifest.part_ids, request.hashes);
  if (session.reads_pool()) keep_digested(run, manifest.part_ids, true);
  wire::AcquireReply answer;
  answer.blocks = static_cast<uint32_t>(run.size());
  if (disk_ == nullptr)
    count_match(session, {answer.blocks, answer.blocks, answer.blocks}, request.hashes.count);
  const ManifestPart* first = manifest.parts.data() + (all ? 0 : request.part);
  for (size_t k = 0; k < wanted; ++k) answer.part_bytes.push_back(first[k].bytes);
  for (Block* block : run) {
    for (size_t k = 0; k < wanted; ++k) {
      const Part& part = *block->find(first[k].part_id);
      answer.offsets.push_back(part.slot.offset);
      answer.generations.push_back(part.slot.generation);
      answer.crcs.push_back(part.crc);
      // Who cannot read the pool gets no bytes.
      if (session.reads_pool()) counters_.bytes_out[session.transport()] += part.slot.bytes;
    }
  }
  if (!run.empty()) answer.lease_id = leases_.acquire(session.id, std::move(run));
  if (!table_.quotas().within_limits(session.tenant)) {
    leases_.release(session.id, answer.lease_id);
    return limit(session, header, "the tenant would hold more blocks than it may");
  }
  reply(session, header, std::move(answer));
  return true;
}

bool Node::release(Session& session, const Header& header, const wire::ReleaseRequest& request) {
  reply(session, header, wire::FlagReply{leases_.release(session.id, request.lease_id)});
  return true;
}

bool Node::get(Session& session, const Header& header, const wire::ReadRequest& request) {
  const Manifest* manifest = manifest_or_fail(session, header, request.manifest_id);
  if (manifest == nullptr) return true;
  if (request.part >= manifest->parts.size()) return refuse(session, header, "no such part");
  return fetch_first(session, header, *manifest, request) ||
         send_run(session, header, *manifest, request);
}

bool Node::send_run(Session& session, const Header& header, const Manifest& manifest,
                    const wire::ReadRequest& request) {
  const ManifestPart& part = manifest.parts[request.part];
  std::vector<Block*> run = leading_run(manifest.spec_id, manifest.part_ids, request.hashes);
  if (session.digests) keep_digested(run, {&part.part_id, 1}, false);
  wire::GetReply answer{part.bytes, {}};
  Outgoing out;
  for (Block* block : run) {
    const Part& stored = *block->find(part.part_id);
    answer.crcs.push_back(stored.crc);
    out.payload.push_back({pool_ + stored.slot.offset, part.bytes});
  }
  const uint64_t payload_bytes = part.bytes * run.size();
  if (!run.empty()) out.pins = std::make_unique<PinnedRun>(table_, std::move(run));
  if (!table_.quotas().within_limits(session.tenant)) {
    out.pins.reset();
    return limit(session, header, "the tenant would hold more blocks than it may");
  }
  counters_.bytes_out[session.stream()] += payload_bytes;
  out.frame = wire::encode_frame(header.op, Status::kOk, header.request_id, answer, payload_bytes);
  queue(session, std::move(out));
  return true;
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
  if (auto landed = waits_.add(std::move(wait))) land(std::move(landed));
  else call_writers();
  return true;
}

void Node::count_wait(Session& session, uint64_t hashes, bool begins) {
  const uint64_t sign = begins ? 1 : ~uint64_t{0};  // modulo 2^64: minus one
  TenantCounts& counts = counts_of(session);
  session.waits += sign, session.wait_hashes += sign * hashes;
  counts.waits += sign, counts.wait_hashes += sign * hashes;
}

bool Node::cancel(Session& session, const Header& header, const wire::CancelRequest& request) {
  const auto wait = waits_.cancel(session.id, request.request_id);
  if (wait) answer_wait(*wait, Status::kCancelled);
  reply(session, header, wire::FlagReply{wait != nullptr});
  return true;
}

void Node::land(std::unique_ptr<Wait> wait) {
  // A lease is on blocks in memory.
  if (wait->lease && fetch_landed(wait)) return;
  answer_wait(*wait, Status::kOk);
}

void Node::answer_wait(const Wait& wait, Status status) {
  Session* session = find_session(wait.session);
  if (session == nullptr) return;
  count_wait(*session, wait.hashes.size(), false);
  wire::WaitReply answer;
  // What landed counts as used: somebody is about to read it.
  answer.blocks = find(wait.spec_id, wait.parts, wait.span(), status == Status::kOk).blocks;
  const bool leasable = leases_.blocks_of(wait.session) + answer.blocks <= kMaxLeasedBlocks;
  if (status == Status::kOk && wait.lease && answer.blocks != 0 && leasable)
    answer.lease_id =
        leases_.acquire(wait.session, leading_run(wait.spec_id, wait.parts, wait.span()));
  if (answer.lease_id != 0 && !table_.quotas().within_limits(session->tenant)) {
    leases_.release(wait.session, std::exchange(answer.lease_id, 0));
    ++counts_of(*session).limited;
  }
  count_landing(wait, status);
  Header header;
  header.op = wire::Op::kWait;
  header.request_id = wait.request_id;
  reply(*session, header, answer, status);
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
  for (const auto& wait : waits_.expired(now_)) answer_wait(*wait, Status::kTimeout);
}

}  // namespace kv
