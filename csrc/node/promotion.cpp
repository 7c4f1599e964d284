#include "node/promotion.h"

namespace kv {
namespace {

constexpr auto kAnnouncedFor = std::chrono::seconds(10);  // nothing waits for announced blocks

}  // namespace

int Promotion::open(DiskOptions options, std::unique_ptr<DiskIo> io) {
  const NodeOptions& node = state_.options;
  auto disk = std::make_unique<DiskTier>(
      std::move(options), node.eviction,
      DiskTier::Memory{state_.table, state_.slab, state_.pool, node.granule_bytes, node.digests},
      static_cast<DiskEvents&>(*this));
  DiskContents found;
  if (const int error = disk->open(found, std::move(io))) return error;
  for (const DiskSpec& spec : found.specs)
    state_.registry.restore_spec(node.tenants.by_name(spec.tenant), spec.digest, spec.number);
  for (const DiskPart& part : found.parts)
    state_.registry.restore_part(part.spec, part.digest, part.bytes, part.number);
  disk_ = std::move(disk);
  state_.disk = disk_.get();
  if (feeds_ != nullptr) disk_->when_left([this](const BlockKey& key) { feeds_->changed(key); });
  runs_ = std::make_unique<DiskRuns>(state_.table, *disk_);
  return 0;
}

void Promotion::name(const Manifest& manifest, const wire::RegisterRequest& request) {
  if (disk_ == nullptr) return;
  disk_->name_spec(manifest.spec_id, state_.options.tenants.name(manifest.tenant), request.spec);
  for (size_t i = 0; i < manifest.parts.size(); ++i)
    disk_->name_part(manifest.spec_id, manifest.parts[i].part_id, request.parts[i].digest,
                     request.parts[i].bytes);
}

DiskRun Promotion::run_of(uint64_t session, uint32_t spec_id, const PartIds& parts, HashSpan hashes,
                          DiskRun::Then then) const {
  const auto patience = std::chrono::duration<double>(disk_->options().read_timeout_s);
  return {session,
          spec_id,
          parts,
          {hashes.data, hashes.data + hashes.count},
          state_.now + std::chrono::duration_cast<TimePoint::duration>(patience),
          std::move(then)};
}

bool Promotion::begin(DiskRun run) {
  const bool announced = run.announced();
  if (!disk_->usable() || !runs_->has_room(announced, run.hashes.size())) return false;
  if (const auto back = runs_->add(std::make_unique<DiskRun>(std::move(run)))) {
    runs_->let_go(*back);
    return false;
  }
  ++(announced ? disk_->counters().announced : disk_->counters().parked);
  return true;
}

void Promotion::announce(const Manifest& manifest, HashSpan hashes) {
  DiskRun run = run_of(0, manifest.spec_id, manifest.part_ids, hashes, nullptr);
  run.deadline = state_.now + kAnnouncedFor;
  begin(std::move(run));
}

void Promotion::committed(const PartKey& key) {
  if (disk_ == nullptr) return;
  disk_->committed(key.block, key.part_id);
  // It may have taken the place of a part that was being read.
  end(runs_->changed(key.block));
}

void Promotion::drop_session(uint64_t session) {
  if (runs_ != nullptr) runs_->drop_session(session);
}

void Promotion::expire() {
  DiskRuns::Ended late = runs_->expired(state_.now);
  disk_->counters().late += static_cast<uint64_t>(
      std::ranges::count_if(late, [](const auto& run) { return !run->announced(); }));
  end(std::move(late));
}

std::optional<TimePoint> Promotion::next_deadline() const {
  if (disk_ == nullptr) return std::nullopt;
  const std::optional<TimePoint> disk = disk_->next_deadline(), run = runs_->next_deadline();
  return disk && run ? std::min(disk, run) : disk ? disk : run;
}

void Promotion::end(DiskRuns::Ended runs) {
  for (const auto& run : runs) {
    runs_->let_go(*run);
    if (run->then) run->then(run->span());
  }
}

void Promotion::on_promoted(const BlockKey& key) {
  arrived_(key);
  end(runs_->changed(key));
}

void Promotion::on_lost(const BlockKey& key) { end(runs_->changed(key)); }

void Promotion::on_bypassed() {
  if (feeds_ != nullptr) feeds_->lose();
  end(runs_->all());
}

}  // namespace kv
