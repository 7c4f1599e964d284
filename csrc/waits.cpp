#include "waits.h"

namespace kv {

std::unique_ptr<Wait> Waits::add(std::unique_ptr<Wait> wait) {
  if (landed(*wait)) return wait;
  const Id id{wait->session, wait->request_id};
  deadlines_.emplace(wait->deadline, id);
  stand(*wait);
  waits_.emplace(id, std::move(wait));
  return nullptr;
}

Waits::Ended Waits::committed(const BlockKey& key) {
  Ended ended;
  const auto [first, last] = standing_.equal_range(key);
  if (first == last) return ended;
  std::vector<Id> ids;
  for (auto at = first; at != last; ++at) ids.push_back(at->second);
  standing_.erase(first, last);
  for (const Id& id : ids) {
    const auto found = waits_.find(id);
    if (!landed(*found->second)) {
      stand(*found->second);
      continue;
    }
    deadlines_.erase({found->second->deadline, id});
    ended.push_back(std::move(found->second));
    waits_.erase(found);
  }
  return ended;
}

Waits::Ended Waits::expired(TimePoint now) {
  Ended ended;
  while (!deadlines_.empty() && deadlines_.begin()->first <= now)
    ended.push_back(take(deadlines_.begin()->second));
  return ended;
}

Waits::Ended Waits::all() {
  Ended ended;
  while (!waits_.empty()) ended.push_back(take(waits_.begin()->first));
  return ended;
}

std::unique_ptr<Wait> Waits::cancel(uint64_t session, uint64_t request_id) {
  return has(session, request_id) ? take({session, request_id}) : nullptr;
}

size_t Waits::drop_session(uint64_t session) {
  size_t dropped = 0;
  for (auto at = waits_.lower_bound({session, 0});
       at != waits_.end() && at->first.first == session; ++dropped) {
    const Id id = at->first;
    ++at;
    take(id);
  }
  return dropped;
}

std::optional<TimePoint> Waits::next_deadline() const {
  if (deadlines_.empty()) return std::nullopt;
  return deadlines_.begin()->first;
}

// Goes on from where the wait stands; before it has landed, once more from the start: blocks that
// were there may have gone meanwhile.
bool Waits::landed(Wait& wait) const {
  const HashSpan all = wait.span();
  const HashSpan rest{all.data + wait.reached, all.count - wait.reached};
  const bool from_start = wait.reached == 0;
  wait.reached += match_(wait.spec_id, wait.parts, rest);
  if (wait.reached < all.count || from_start) return wait.reached == all.count;
  wait.reached = match_(wait.spec_id, wait.parts, all);
  return wait.reached == all.count;
}

void Waits::stand(Wait& wait) {
  standing_.emplace(BlockKey{wait.spec_id, wait.hashes[wait.reached]},
                    Id{wait.session, wait.request_id});
}

std::unique_ptr<Wait> Waits::take(Id id) {
  const auto found = waits_.find(id);
  std::unique_ptr<Wait> wait = std::move(found->second);
  waits_.erase(found);
  deadlines_.erase({wait->deadline, id});
  const auto [first, last] = standing_.equal_range({wait->spec_id, wait->hashes[wait->reached]});
  for (auto at = first; at != last; ++at) {
    if (at->second != id) continue;
    standing_.erase(at);
    break;
  }
  return wait;
}

}  // namespace kv
