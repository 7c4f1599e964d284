#include "node/landings.h"

namespace kv {

using wire::Header;
using wire::Status;

Landings::Landings(NodeState& state, Replies& replies, Lookup& lookup, Promotion& promotion)
    : state_(state), replies_(replies), lookup_(lookup), promotion_(promotion),
      waits_([this](uint32_t spec_id, const PartIds& parts, HashSpan hashes) {
        return lookup_.find_all(spec_id, parts, hashes);
      }) {}

bool Landings::wait(Session& session, const Header& header, const wire::WaitRequest& request) {
  if (request.upto > request.hashes.count)
    return replies_.refuse(session, header, "upto is greater than the number of hashes");
  if (waits_.has(session.id, header.request_id))
    return replies_.refuse(session, header, "this request id waits already");
  const Manifest* manifest = replies_.manifest_or_fail(session, header, request.manifest_id);
  if (manifest == nullptr) return true;
  if (session.waits >= kMaxWaits || session.wait_hashes + request.upto > kMaxWaitHashes)
    return replies_.fail(session, header, Status::kLimit, "too many waits of this connection");
  const TenantCounts& tenant = state_.counts_of(session);
  const TenantLimits& limits = state_.options.limits;
  if (tenant.waits >= limits.waits || tenant.wait_hashes + request.upto > limits.wait_hashes)
    return replies_.limit(session, header, "too many waits of this tenant");
  const auto patience =
      std::chrono::milliseconds(std::min(request.deadline_ms, wire::kMaxDeadlineMs));
  auto wait = std::make_unique<Wait>(
      Wait{session.id, header.request_id, manifest->spec_id, manifest->part_ids,
           std::vector<Hash>(request.hashes.data, request.hashes.data + request.upto),
           request.lease != 0, state_.now + patience, 0, state_.now});
  count(session, request.upto, true);
  waits_.add(std::move(wait));
  go_on();
  return true;
}

bool Landings::cancel(Session& session, const Header& header, const wire::CancelRequest& request) {
  auto wait = waits_.cancel(session.id, request.request_id);
  const bool waited = wait != nullptr;
  if (waited) end(std::move(wait), Status::kCancelled);
  // The reply to the WAIT goes first, also if it has just landed.
  const auto ended = std::ranges::find_if(ended_, [&](const Ended& one) {
    return one.wait->session == session.id && one.wait->request_id == request.request_id;
  });
  Turn at_once = Turn::endless();
  if (ended != ended_.end() && answer(*ended, at_once)) ended_.erase(ended);
  replies_.send(session, header, wire::FlagReply{waited});
  return true;
}

void Landings::committed(const BlockKey& key) {
  waits_.committed(key);
  go_on();
}

void Landings::go_on() {
  while (auto wait = waits_.landed(state_.turn)) land(std::move(wait));
  answer_ended();
}

// A lease is on blocks in memory: those on the disk only are brought first.
void Landings::land(SharedWait wait) {
  if (!wait->lease || state_.disk == nullptr || in_memory(*wait))
    return end(std::move(wait), Status::kOk);
  const auto then = [this, wait](HashSpan) {
    end(wait, in_memory(*wait) ? Status::kOk : Status::kTimeout);
  };
  if (!promotion_.begin(
          promotion_.run_of(wait->session, wait->spec_id, wait->parts, wait->span(), then)))
    then({});
}

bool Landings::in_memory(const Wait& wait) const {
  return state_.table.match(wait.spec_id, wait.parts, wait.span()) == wait.hashes.size();
}

void Landings::end(SharedWait wait, Status status) {
  Ended ended{std::move(wait), status};
  const Wait& one = *ended.wait;
  const bool leasable =
      state_.leases.blocks_of(one.session) + one.hashes.size() <= NodeState::kMaxLeasedBlocks;
  if (status == Status::kOk && one.lease && leasable && !one.hashes.empty()) {
    if (Block* last = state_.table.find_complete({one.spec_id, one.hashes.back()}, one.parts)) {
      ended.lease_id = state_.leases.acquire(one.session, {last});
      ended.end = last;
    }
  }
  ended_.push_back(std::move(ended));
  answer_ended();
}

void Landings::answer_ended() {
  while (!ended_.empty() && !state_.turn.over() && answer(ended_.front(), state_.turn))
    ended_.pop_front();
}

// True: the reply is queued, or the connection has ended.
bool Landings::answer(Ended& ended, Turn& turn) {
  const Wait& wait = *ended.wait;
  Session* session = state_.find_session(wait.session);
  if (session == nullptr) return true;
  const bool landed = ended.status == Status::kOk;
  Found& found = ended.found;
  for (; found.blocks < wait.hashes.size(); turn.spend(1)) {
    if (turn.over()) return false;
    // Landed blocks count as used: the client is about to read them.
    const BlockKey key{wait.spec_id, wait.hashes[found.blocks]};
    if (!lookup_.find_next(found, key, wait.parts, landed)) break;
    const bool leads = found.blocks == found.leading_in_memory && found.last != ended.end;
    if (ended.lease_id != 0 && leads) state_.leases.add(wait.session, ended.lease_id, *found.last);
  }
  count(*session, wait.hashes.size(), false);
  // What had landed may be purged or evicted before it is answered.
  const bool gone = landed && found.blocks < wait.hashes.size();
  const Status status = gone ? Status::kTimeout : ended.status;
  wire::WaitReply answer{found.blocks, ended.lease_id};
  const bool within = state_.table.quotas().within_limits(session->tenant);
  if (ended.lease_id != 0 && (!within || gone)) {
    state_.leases.release(wait.session, std::exchange(answer.lease_id, 0));
    state_.counts_of(*session).limited += within ? 0 : 1;
  }
  count_landing(wait, status);
  replies_.send(*session, {.op = wire::Op::kWait, .request_id = wait.request_id}, answer, status);
  return true;
}

void Landings::expire() {
  for (auto& wait : waits_.expired(state_.now)) end(std::move(wait), Status::kTimeout);
}

void Landings::end_all() {
  for (auto& wait : waits_.all()) end(std::move(wait), Status::kTimeout);
}

void Landings::drop_session(const Session& session) {
  state_.counters.landings[Landing::kGone] += waits_.drop_session(session.id);
  if (!session.greeted) return;
  TenantCounts& tenant = state_.counts_of(session);
  tenant.waits -= session.waits;
  tenant.wait_hashes -= session.wait_hashes;
}

void Landings::count(Session& session, uint64_t hashes, bool begins) {
  const uint64_t sign = begins ? 1 : ~uint64_t{0};  // modulo 2^64: minus one
  TenantCounts& tenant = state_.counts_of(session);
  session.waits += sign, session.wait_hashes += sign * hashes;
  tenant.waits += sign, tenant.wait_hashes += sign * hashes;
}

void Landings::count_landing(const Wait& wait, Status status) {
  Counters& counters = state_.counters;
  if (status == Status::kOk) {
    const std::chrono::nanoseconds waited = state_.now - wait.since;
    counters.landing_waits.observe(static_cast<uint64_t>(waited.count()));
  }
  ++counters.landings[status == Status::kOk        ? Landing::kLanded
                      : status == Status::kTimeout ? Landing::kTimeout
                                                   : Landing::kCancelled];
}

}  // namespace kv
