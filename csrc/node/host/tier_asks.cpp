#include "node/host/tier_asks.h"

namespace kv {

int TierAsks::offer(double timeout_s) {
  if (const int error = ready_.get() >= 0 ? 0 : ready_.open()) return error;
  timeout_ = std::chrono::duration<double>(timeout_s);
  return 0;
}

bool TierAsks::begin(uint64_t session, const Manifest& manifest, HashSpan hashes,
                     std::vector<uint32_t> missing, bool load, Then then) {
  if (!offered() || missing.empty() || state_.draining) return false;
  if (pending_.size() >= kMaxAsks || hashes_ + hashes.count > kMaxHashes) return false;
  const uint64_t id = ++last_id_;
  const auto patience = timeout_ * (then ? 1 : kAnnouncedTimes);
  const auto until = state_.now + std::chrono::duration_cast<TimePoint::duration>(patience);
  std::vector<Hash> names(hashes.data, hashes.data + hashes.count);
  hashes_ += names.size();
  deadlines_.emplace(until, id);
  pending_.emplace(
      id, Pending{session, names, static_cast<uint32_t>(missing.size()), until, std::move(then)});
  asks_[id] = {id, load, std::string(state_.options.tenants.name(manifest.tenant)), manifest.digest,
               std::move(names), std::move(missing)};
  ready_.signal();
  return true;
}

std::vector<TierAsk> TierAsks::take() {
  ready_.clear();
  std::vector<TierAsk> asks;
  for (auto& [id, ask] : std::exchange(asks_, {})) asks.push_back(std::move(ask));
  return asks;
}

bool TierAsks::answer(uint64_t id, uint32_t found) {
  const auto at = pending_.find(id);
  if (at == pending_.end()) return false;
  answered_.emplace_back(id, std::min(found, at->second.missing));
  return true;
}

void TierAsks::go_on() {
  for (const auto& [id, found] : std::exchange(answered_, {}))
    if (const auto at = pending_.find(id); at != pending_.end()) end(at, found);
}

void TierAsks::expire() {
  while (!deadlines_.empty() && deadlines_.begin()->first <= state_.now)
    end(pending_.find(deadlines_.begin()->second), 0);
}

// Out of sight first: `then` may begin another one.
void TierAsks::end(Entries::iterator at, uint32_t found) {
  const Pending ended = std::move(at->second);
  deadlines_.erase({ended.until, at->first});
  asks_.erase(at->first);  // a host that takes nothing any more leaves none behind
  pending_.erase(at);
  hashes_ -= ended.hashes.size();
  if (ended.then)
    ended.then({ended.hashes.data(), static_cast<uint32_t>(ended.hashes.size())}, found);
}

void TierAsks::drop_session(uint64_t session) {
  for (auto at = pending_.begin(); at != pending_.end();) {
    const auto next = std::next(at);
    if (at->second.session == session && at->second.then) {
      at->second.then = nullptr;
      end(at, 0);
    }
    at = next;
  }
}

std::optional<TimePoint> TierAsks::next_deadline() const {
  if (deadlines_.empty()) return std::nullopt;
  return deadlines_.begin()->first;
}

}  // namespace kv
