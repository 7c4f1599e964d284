#include "disk/runs.h"

#include <algorithm>

namespace kv {

bool DiskRuns::has_room(bool announced, size_t hashes) const {
  if (announced && announced_ >= kMaxAnnounced) return false;
  return runs_.size() < kMaxRuns && hashes_ + hashes <= kMaxHashes;
}

std::unique_ptr<DiskRun> DiskRuns::add(std::unique_ptr<DiskRun> run) {
  run->id = ++last_id_;
  run->end = static_cast<uint32_t>(run->hashes.size());
  advance(*run);
  if (over(*run)) {
    starved_.erase(run->id);
    return run;
  }
  announced_ += run->announced() ? 1 : 0;
  hashes_ += run->hashes.size();
  deadlines_.emplace(run->deadline, run->id);
  runs_.emplace(run->id, std::move(run));
  return nullptr;
}

void DiskRuns::advance(DiskRun& run) {
  starved_.erase(run.id);
  while (run.next < run.end && run.awaited < kWindow) {
    const BlockKey key{run.spec_id, run.hashes[run.next]};
    if (Block* block = memory_.find_complete(key, run.parts)) {
      memory_.pin(*block);
      run.pinned.push_back(block);
      ++run.next;
      continue;
    }
    switch (disk_.promote(key, run.parts)) {
      case DiskTier::Promote::kLater: starved_.insert(run.id); return;
      case DiskTier::Promote::kNone: run.end = run.next; return;
      case DiskTier::Promote::kReading:
        standing_.emplace(key, Standing{run.id, run.next});
        ++run.awaited;
        ++run.next;
    }
  }
}

// Updates the runs that wait for this block.
void DiskRuns::look_at(const BlockKey& key, std::set<uint64_t>& touched) {
  const auto [first, last] = standing_.equal_range(key);
  for (auto at = first; at != last;) {
    DiskRun& run = *runs_.find(at->second.run)->second;
    Block* block = memory_.find_complete(key, run.parts);
    if (block == nullptr && disk_.promoting(key, run.parts)) {
      ++at;
      continue;
    }
    touched.insert(run.id);
    --run.awaited;
    if (block != nullptr) {
      memory_.pin(*block);
      run.pinned.push_back(block);
    } else {
      run.end = std::min(run.end, at->second.index);
    }
    at = standing_.erase(at);
  }
}

DiskRuns::Ended DiskRuns::changed(const BlockKey& key) {
  std::set<uint64_t> touched = starved_;
  look_at(key, touched);
  Ended ended;
  // In the order in which they came.
  for (const uint64_t id : touched) {
    DiskRun& run = *runs_.find(id)->second;
    advance(run);
    if (over(run)) ended.push_back(take(id));
  }
  return ended;
}

DiskRuns::Ended DiskRuns::expired(TimePoint now) {
  Ended ended;
  while (!deadlines_.empty() && deadlines_.begin()->first <= now)
    ended.push_back(take(deadlines_.begin()->second));
  return ended;
}

DiskRuns::Ended DiskRuns::all() {
  Ended ended;
  while (!runs_.empty()) ended.push_back(take(runs_.begin()->first));
  return ended;
}

void DiskRuns::drop_session(uint64_t session) {
  std::vector<uint64_t> ids;
  for (const auto& [id, run] : runs_)
    if (run->session == session) ids.push_back(id);
  for (const uint64_t id : ids) let_go(*take(id));
}

void DiskRuns::let_go(DiskRun& run) {
  for (Block* block : std::exchange(run.pinned, {})) memory_.unpin(*block);
}

std::unique_ptr<DiskRun> DiskRuns::take(uint64_t id) {
  const auto found = runs_.find(id);
  std::unique_ptr<DiskRun> run = std::move(found->second);
  runs_.erase(found);
  deadlines_.erase({run->deadline, id});
  starved_.erase(id);
  announced_ -= run->announced() ? 1 : 0;
  hashes_ -= run->hashes.size();
  // The blocks that it awaits are read all the same, for other runs and later requests.
  for (uint32_t i = 0; i < run->next && run->awaited != 0; ++i) {
    const auto [first, last] = standing_.equal_range({run->spec_id, run->hashes[i]});
    for (auto at = first; at != last; ++at) {
      if (at->second.run != id) continue;
      standing_.erase(at);
      --run->awaited;
      break;
    }
  }
  return run;
}

std::optional<TimePoint> DiskRuns::next_deadline() const {
  if (deadlines_.empty()) return std::nullopt;
  return deadlines_.begin()->first;
}

}  // namespace kv
