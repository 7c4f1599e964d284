#include "node/reads.h"

#include <span>

namespace kv {

using wire::BlockStatus;
using wire::Header;
using wire::Status;

bool Reads::match(Session& session, const Header& header, const wire::MatchRequest& request) {
  if (replies_.manifest_or_fail(session, header, request.manifest_id) == nullptr) return true;
  return in_turns(session, [=, this, &session, found = Found(), missing = Missing()]() mutable {
    const Manifest& manifest = *state_.registry.find(session.tenant, request.manifest_id);
    if (!lookup_.find_more(found, manifest, request.hashes, true)) return false;
    if (!find_missing(session, missing, found, manifest, request.hashes)) return false;
    const auto answer = [=, this, places = missing.places](Session& waiting, HashSpan hashes,
                                                           uint32_t in_tiers) {
      const uint32_t blocks = in_tiers == places.size() ? hashes.count : places[in_tiers];
      const wire::MatchRequest kept{request.manifest_id, request.promote, hashes};
      answer_match(waiting, header, kept, found, blocks);
      lookup_.count_remote(waiting, blocks - found.blocks, hashes.count - found.blocks);
      if (request.promote != 0)
        bring(waiting, kept, found, {places.begin(), places.begin() + in_tiers});
    };
    if (!missing.places.empty() &&
        ask_tiers(session, manifest, request.hashes, missing.places, false, answer))
      return true;
    answer_match(session, header, request, found, found.blocks);
    if (request.promote != 0) bring(session, request, found, {});
    return true;
  });
}

// `blocks`: with those that a tier below the node has.
void Reads::answer_match(Session& session, const Header& header, const wire::MatchRequest& request,
                         const Found& found, uint32_t blocks) {
  lookup_.count(session, found, request.hashes.count);
  wire::MatchReply answer{blocks, {}};
  const auto place = [&](uint32_t upto, Tier tier) {
    answer.places.push_back({upto, state_.options.node, static_cast<uint8_t>(tier)});
  };
  if (found.leading_in_memory != 0) place(found.leading_in_memory, Tier::kMemory);
  if (found.blocks > found.leading_in_memory) place(found.blocks, Tier::kDisk);
  if (blocks > found.blocks) place(blocks, Tier::kRemote);
  replies_.send(session, header, std::move(answer));
}

// Begins to bring blocks into memory that are on the disk or in a tier below the node.
void Reads::bring(Session& session, const wire::MatchRequest& request, const Found& found,
                  std::vector<uint32_t> in_tiers) {
  const Manifest& manifest = *state_.registry.find(session.tenant, request.manifest_id);
  if (!in_tiers.empty())
    tier_asks_.begin(session.id, manifest, request.hashes, std::move(in_tiers), true, nullptr);
  if (found.in_memory == found.blocks) return;
  const BlockKey first{manifest.spec_id, request.hashes[found.leading_in_memory]};
  // If its first block is being read, so is the rest.
  if (!state_.disk->promoting(first, manifest.part_ids))
    promotion_.announce(manifest, {request.hashes.data, found.blocks});
}

// True: `missing` is complete. Without tiers nothing is looked for, nor for their own host.
bool Reads::find_missing(const Session& session, Missing& missing, const Found& found,
                         const Manifest& manifest, HashSpan hashes) {
  if (!tier_asks_.offered() || session.name == TierAsks::kHostName) return true;
  missing.next = std::max(missing.next, found.blocks);
  return lookup_.find_missing(missing.places, missing.next, manifest, hashes);
}

// True: `answer` is called when the tiers below the node have answered, unless the session ends.
bool Reads::ask_tiers(Session& session, const Manifest& manifest, HashSpan hashes,
                      std::vector<uint32_t> missing, bool load, Answer answer) {
  if (session.parked >= Session::kMaxParked) return false;
  const auto then = [this, id = session.id, answer = std::move(answer)](HashSpan kept,
                                                                        uint32_t found) {
    Session* const waiting = state_.find_session(id);
    if (waiting == nullptr) return;
    --waiting->parked;
    // In one turn: the connection may be at another request by now.
    const Turn before = std::exchange(state_.turn, Turn::endless());
    answer(*waiting, kept, found);
    state_.turn = before;
  };
  if (!tier_asks_.begin(session.id, manifest, hashes, std::move(missing), load, then)) return false;
  ++session.parked;
  return true;
}

// A question about many blocks, of which few will be read: it does not count as a use of them.
bool Reads::held(Session& session, const Header& header, const wire::BlocksRequest& request) {
  if (replies_.manifest_or_fail(session, header, request.manifest_id) == nullptr) return true;
  return in_turns(session, [=, this, &session, missing = Missing()]() mutable {
    const Manifest& manifest = *state_.registry.find(session.tenant, request.manifest_id);
    if (!lookup_.find_missing(missing.places, missing.next, manifest, request.hashes)) return false;
    const auto answer = [=, this, places = missing.places](Session& waiting, HashSpan hashes,
                                                           uint32_t in_tiers) {
      wire::StatusesReply reply;
      reply.statuses.assign(hashes.count, static_cast<uint8_t>(BlockStatus::kExists));
      for (size_t i = in_tiers; i < places.size(); ++i)
        reply.statuses[places[i]] = static_cast<uint8_t>(BlockStatus::kMissing);
      replies_.send(waiting, header, std::move(reply));
    };
    if (missing.places.empty() ||
        !ask_tiers(session, manifest, request.hashes, missing.places, false, answer))
      answer(session, request.hashes, 0);
    return true;
  });
}

bool Reads::acquire(Session& session, const Header& header, const wire::ReadRequest& request) {
  const Manifest* manifest = replies_.manifest_or_fail(session, header, request.manifest_id);
  if (manifest == nullptr) return true;
  const bool all = request.part == wire::kAllParts;
  if (!all && request.part >= manifest->parts.size())
    return replies_.refuse(session, header, "no such part");
  const size_t wanted = all ? manifest->parts.size() : 1;
  if (wanted * request.hashes.count > wire::kMaxSlots ||
      state_.leases.blocks_of(session.id) + request.hashes.count > NodeState::kMaxLeasedBlocks)
    return replies_.fail(session, header, Status::kLimit,
                         "too many blocks in one lease, or leased by this connection");
  return read(session, header, request);
}

bool Reads::get(Session& session, const Header& header, const wire::ReadRequest& request) {
  const Manifest* manifest = replies_.manifest_or_fail(session, header, request.manifest_id);
  if (manifest == nullptr) return true;
  if (request.part >= manifest->parts.size())
    return replies_.refuse(session, header, "no such part");
  return read(session, header, request);
}

// ACQUIRE and GET. With a disk or tiers, blocks are looked up first, and waited for if memory lacks
// them.
bool Reads::read(Session& session, const Header& header, const wire::ReadRequest& request) {
  TurnStep serve_now = serve(session, header, request);
  if (state_.disk == nullptr && !tier_asks_.offered())
    return in_turns(session, std::move(serve_now));
  return in_turns(session, [=, this, &session, serve_now = std::move(serve_now), found = Found(),
                            missing = Missing(), looking = true]() mutable {
    if (!looking) return serve_now();
    const Manifest& manifest = *state_.registry.find(session.tenant, request.manifest_id);
    if (!lookup_.find_more(found, manifest, request.hashes, false)) return false;
    if (!find_missing(session, missing, found, manifest, request.hashes)) return false;
    looking = false;
    if (!missing.places.empty() &&
        load_first(session, header, manifest, request, std::move(missing.places)))
      return true;
    return fetch_first(session, header, manifest, request, found) || serve_now();
  });
}

// True: the request is answered when its blocks have been brought from the tiers below the node.
bool Reads::load_first(Session& session, const Header& header, const Manifest& manifest,
                       const wire::ReadRequest& request, std::vector<uint32_t> missing) {
  const auto answer = [this, header, manifest_id = request.manifest_id,
                       part = request.part](Session& waiting, HashSpan hashes, uint32_t) {
    const Manifest& named = *state_.registry.find(waiting.tenant, manifest_id);
    const wire::ReadRequest kept{manifest_id, part, hashes};
    Found found;
    lookup_.find_more(found, named, hashes, false);
    if (!fetch_first(waiting, header, named, kept, found)) serve(waiting, header, kept)();
  };
  return ask_tiers(session, manifest, request.hashes, std::move(missing), true, answer);
}

// True: the request is answered when its blocks have been brought from the disk.
bool Reads::fetch_first(Session& session, const Header& header, const Manifest& manifest,
                        const wire::ReadRequest& request, const Found& found) {
  const HashSpan hashes = request.hashes;
  if (state_.disk == nullptr) return false;  // give_lease() counts
  if (header.op == wire::Op::kAcquire) lookup_.count(session, found, hashes.count);
  if (found.leading_in_memory == hashes.count || session.parked >= Session::kMaxParked ||
      !state_.disk->has({manifest.spec_id, hashes[found.leading_in_memory]}, manifest.part_ids))
    return false;
  const auto then = [this, id = session.id, header, manifest_id = request.manifest_id,
                     part = request.part](HashSpan kept) {
    Session* const waiting = state_.find_session(id);
    if (waiting == nullptr) return;
    --waiting->parked;
    // In one turn: the connection may be at another request by now.
    const Turn before = std::exchange(state_.turn, Turn::endless());
    serve(*waiting, header, {manifest_id, part, kept})();
    state_.turn = before;
  };
  if (!promotion_.begin(
          promotion_.run_of(session.id, manifest.spec_id, manifest.part_ids, hashes, then)))
    return false;
  ++session.parked;
  return true;
}

TurnStep Reads::serve(Session& session, const Header& header, const wire::ReadRequest& request) {
  return header.op == wire::Op::kGet ? send_run(session, header, request)
                                     : give_lease(session, header, request);
}

// The next block of the run; null: the run has ended, or the turn is over.
Block* Reads::next_of(Run& run, const Manifest& manifest, HashSpan hashes) {
  run.ended = run.ended || run.blocks == hashes.count;
  if (run.ended || state_.turn.over()) return nullptr;
  state_.turn.spend(manifest.parts.size());
  Block* const block =
      state_.table.find_complete({manifest.spec_id, hashes[run.blocks]}, manifest.part_ids);
  run.ended = block == nullptr;
  if (run.ended) return nullptr;
  state_.table.touch(*block);
  ++run.blocks;
  return block;
}

TurnStep Reads::give_lease(Session& session, const Header& header,
                           const wire::ReadRequest& request) {
  return [=, this, &session, run = Run(), answer = wire::AcquireReply()]() mutable {
    const Manifest& manifest = *state_.registry.find(session.tenant, request.manifest_id);
    const std::span<const ManifestPart> wanted =
        request.part == wire::kAllParts ? std::span(manifest.parts)
                                        : std::span(manifest.parts).subspan(request.part, 1);
    // A block is leased only with all parts of the manifest, also if one part is asked for.
    while (Block* block = next_of(run, manifest, request.hashes)) {
      if (answer.lease_id == 0) answer.lease_id = state_.leases.acquire(session.id);
      state_.leases.add(session.id, answer.lease_id, *block);
      for (const ManifestPart& one : wanted) {
        const Part& part = *block->find(one.part_id);
        answer.offsets.push_back(part.slot.offset);
        answer.generations.push_back(part.slot.generation);
        answer.crcs.push_back(part.crc);
        // A client that cannot read the pool gets no bytes.
        if (session.reads_pool()) state_.counters.bytes_out[session.transport()] += part.slot.bytes;
      }
    }
    if (!run.ended) return false;
    answer.blocks = run.blocks;
    for (const ManifestPart& one : wanted) answer.part_bytes.push_back(one.bytes);
    if (state_.disk == nullptr)
      lookup_.count(session, {run.blocks, run.blocks, run.blocks}, request.hashes.count);
    if (!state_.table.quotas().within_limits(session.tenant)) {
      state_.leases.release(session.id, answer.lease_id);
      return replies_.limit(session, header, "the tenant would hold more blocks than it may");
    }
    replies_.send(session, header, std::move(answer));
    return true;
  };
}

bool Reads::release(Session& session, const Header& header, const wire::ReleaseRequest& request) {
  const bool held = state_.leases.has(session.id, request.lease_id);
  return in_turns(session, [=, this, &session] {
    if (!state_.leases.release(session.id, request.lease_id, state_.turn)) return false;
    replies_.send(session, header, wire::FlagReply{held});
    return true;
  });
}

TurnStep Reads::send_run(Session& session, const Header& header, const wire::ReadRequest& request) {
  return
      [=, this, &session, run = Run(), answer = wire::GetReply(),
       pins = std::make_shared<PinnedRun>(state_.table), payload = std::vector<iovec>()]() mutable {
        const Manifest& manifest = *state_.registry.find(session.tenant, request.manifest_id);
        const ManifestPart& part = manifest.parts[request.part];
        while (Block* block = next_of(run, manifest, request.hashes)) {
          pins->add(*block);
          const Part& stored = *block->find(part.part_id);
          answer.crcs.push_back(stored.crc);
          payload.push_back({state_.pool + stored.slot.offset, part.bytes});
        }
        if (!run.ended) return false;
        if (!state_.table.quotas().within_limits(session.tenant)) {
          pins.reset();
          return replies_.limit(session, header, "the tenant would hold more blocks than it may");
        }
        answer.part_bytes = part.bytes;
        const uint64_t bytes = part.bytes * run.blocks;
        state_.counters.bytes_out[session.stream()] += bytes;
        Outgoing out{wire::encode_frame(header.op, Status::kOk, header.request_id, answer, bytes)};
        out.payload = std::move(payload);
        out.pins = std::move(pins);
        replies_.queue(session, std::move(out));
        return true;
      };
}

}  // namespace kv
