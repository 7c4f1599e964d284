// What a node does about the disk under its memory: requests wait here until their blocks have come.
#include <algorithm>

#include "node/node.h"

namespace kv {

using wire::Op;
using wire::Status;

namespace {

// What is brought ahead of a read nobody waits for.
constexpr auto kAnnouncedFor = std::chrono::seconds(10);

}  // namespace

int Node::open_disk(DiskOptions options, std::unique_ptr<DiskIo> io) {
  auto disk = std::make_unique<DiskTier>(
      std::move(options), options_.eviction,
      DiskTier::Memory{table_, slab_, pool_, options_.granule_bytes, options_.digests},
      static_cast<DiskEvents&>(*this));
  DiskContents found;
  if (const int error = disk->open(found, std::move(io))) return error;
  for (const DiskSpec& spec : found.specs)
    registry_.restore_spec(options_.tenants.by_name(spec.tenant), spec.digest, spec.number);
  for (const DiskPart& part : found.parts)
    registry_.restore_part(part.spec, part.digest, part.bytes, part.number);
  disk_ = std::move(disk);
  runs_ = std::make_unique<DiskRuns>(table_, *disk_);
  return 0;
}

void Node::name_on_disk(const Manifest& manifest, const wire::RegisterRequest& request) {
  disk_->name_spec(manifest.spec_id, options_.tenants.name(manifest.tenant), request.spec);
  for (size_t i = 0; i < manifest.parts.size(); ++i)
    disk_->name_part(manifest.spec_id, manifest.parts[i].part_id, request.parts[i].digest,
                     request.parts[i].bytes);
}

std::optional<TimePoint> Node::next_deadline() const {
  std::optional<TimePoint> next = waits_.next_deadline();
  if (disk_ == nullptr) return next;
  for (const auto& other : {disk_->next_deadline(), runs_->next_deadline()})
    if (other && (!next || *other < *next)) next = other;
  return next;
}

void Node::expire_runs() {
  DiskRuns::Ended late = runs_->expired(now_);
  for (const auto& run : late)
    disk_->counters().late += run->kind == DiskRun::Kind::kAnnounced ? 0 : 1;
  end_runs(std::move(late));
}

// True: the request waits for blocks that lie on the disk alone. `here`: how many lead in memory.
bool Node::fetch_first(Session& session, const Header& header, const Manifest& manifest,
                       const wire::ReadRequest& request, uint32_t here) {
  const HashSpan hashes = request.hashes;
  if (!disk_->usable() || here == hashes.count ||
      !disk_->has({manifest.spec_id, hashes[here]}, manifest.part_ids) ||
      session.parked >= Session::kMaxParked ||
      !runs_->has_room(DiskRun::Kind::kRequest, hashes.count))
    return false;
  auto run = std::make_unique<DiskRun>();
  run->kind = DiskRun::Kind::kRequest;
  run->session = session.id;
  run->header = header;
  run->manifest_id = manifest.id;
  run->part = request.part;
  run->spec_id = manifest.spec_id;
  run->parts = manifest.part_ids;
  run->hashes.assign(hashes.data, hashes.data + hashes.count);
  run->deadline = now_ + std::chrono::duration_cast<TimePoint::duration>(
                             std::chrono::duration<double>(disk_->options().read_timeout_s));
  if (const auto back = runs_->add(std::move(run))) {
    runs_->let_go(*back);
    return false;
  }
  ++session.parked;
  ++disk_->counters().parked;
  return true;
}

void Node::announce(const Manifest& manifest, const Found& found, HashSpan hashes) {
  if (disk_ == nullptr || found.in_memory == found.blocks) return;
  const BlockKey first{manifest.spec_id, hashes[found.leading_in_memory]};
  // Somebody brings it already, from its first block on.
  if (disk_->promoting(first, manifest.part_ids)) return;
  if (!runs_->has_room(DiskRun::Kind::kAnnounced, found.blocks)) return;
  auto run = std::make_unique<DiskRun>();
  run->spec_id = manifest.spec_id;
  run->parts = manifest.part_ids;
  run->hashes.assign(hashes.data, hashes.data + found.blocks);
  run->deadline = now_ + kAnnouncedFor;
  ++disk_->counters().announced;
  if (const auto back = runs_->add(std::move(run))) runs_->let_go(*back);
}

// True: the wait is answered when its blocks are in memory. Else it is the caller's again.
bool Node::fetch_landed(std::unique_ptr<Wait>& wait) {
  if (disk_ == nullptr || find_session(wait->session) == nullptr) return false;
  const HashSpan hashes = wait->span();
  if (table_.match(wait->spec_id, wait->parts, hashes, false) == hashes.count) return false;
  if (!runs_->has_room(DiskRun::Kind::kLanding, hashes.count)) {
    answer_wait(std::move(wait), Status::kTimeout);
    return true;
  }
  auto run = std::make_unique<DiskRun>();
  run->kind = DiskRun::Kind::kLanding;
  run->session = wait->session;
  run->spec_id = wait->spec_id;
  run->parts = wait->parts;
  run->hashes = wait->hashes;
  run->deadline = now_ + std::chrono::duration_cast<TimePoint::duration>(
                             std::chrono::duration<double>(disk_->options().read_timeout_s));
  run->wait = std::move(wait);
  ++disk_->counters().parked;
  if (auto back = runs_->add(std::move(run))) end_run(std::move(back));
  return true;
}

void Node::end_run(std::unique_ptr<DiskRun> run) {
  runs_->let_go(*run);
  Session* session = find_session(run->session);
  if (run->kind == DiskRun::Kind::kAnnounced || session == nullptr) return;
  if (run->kind == DiskRun::Kind::kLanding) {
    const uint32_t here = table_.match(run->spec_id, run->parts, run->span(), false);
    return answer_wait(std::move(run->wait),
                       here == run->hashes.size() ? Status::kOk : Status::kTimeout);
  }
  --session->parked;
  const wire::ReadRequest request{run->manifest_id, run->part, run->span()};
  const TurnStep serve = run->header.op == Op::kGet ? send_run(*session, run->header, request)
                                                 : give_lease(*session, run->header, request);
  // At once: the connection may be at another request.
  const Turn before = std::exchange(turn_, Turn::endless());
  serve();
  turn_ = before;
}

void Node::end_runs(DiskRuns::Ended runs) {
  for (auto& run : runs) end_run(std::move(run));
}

void Node::on_promoted(const BlockKey& key) {
  waits_.committed(key);
  land_waits();
  end_runs(runs_->changed(key));
}

void Node::on_lost(const BlockKey& key) { end_runs(runs_->changed(key)); }

void Node::on_bypassed() { end_runs(runs_->all()); }

}  // namespace kv
