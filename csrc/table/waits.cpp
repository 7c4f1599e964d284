#include "table/waits.h"

#include <utility>

namespace kv {

void Waits::add(std::unique_ptr<Wait> wait) {
  const Id id{wait->session, wait->request_id};
  deadlines_.emplace(wait->deadline, id);
  waits_.emplace(id, std::move(wait));
  looking_.push_back(id);
}

void Waits::committed(const BlockKey& key) {
  const auto [first, last] = standing_.equal_range(key);
  for (auto at = first; at != last; ++at) {
    waits_.find(at->second)->second->stands = false;
    looking_.push_back(at->second);
  }
  standing_.erase(first, last);
}

std::unique_ptr<Wait> Waits::landed(Turn& turn) {
  while (!looking_.empty() && !turn.over()) {
    const Id id = looking_.front();
    const auto found = waits_.find(id);
    const bool ended = found == waits_.end() || found->second->stands;
    const bool landed = !ended && look(*found->second, turn);
    if (!ended && !landed && !found->second->stands) continue;
    looking_.pop_front();
    if (landed) return take(id);
  }
  return nullptr;
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
  for (auto at = waits_.lower_bound({session, 0}); at != waits_.end() && at->first.first == session;
       ++dropped) {
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

// Goes on from where the wait stood; at the end, once more from the start: blocks that were there
// may have been evicted meanwhile. True: landed. Neither landed nor standing: the turn is over.
bool Waits::look(Wait& wait, Turn& turn) {
  const HashSpan all = wait.span();
  while (!turn.over()) {
    const uint32_t count = std::min(all.count - wait.reached, turn.left());
    const uint32_t found = match_(wait.spec_id, wait.parts, {all.data + wait.reached, count});
    turn.spend(found + 1);
    wait.reached += found;
    if (found < count) {
      wait.stands = true, wait.from_start = false;
      standing_.emplace(BlockKey{wait.spec_id, wait.hashes[wait.reached]},
                        Id{wait.session, wait.request_id});
      return false;
    }
    if (wait.reached < all.count) continue;
    if (std::exchange(wait.from_start, true)) return true;
    wait.reached = 0;
  }
  return false;
}

std::unique_ptr<Wait> Waits::take(Id id) {
  const auto found = waits_.find(id);
  std::unique_ptr<Wait> wait = std::move(found->second);
  waits_.erase(found);
  deadlines_.erase({wait->deadline, id});
  if (!wait->stands) return wait;
  const auto [first, last] = standing_.equal_range({wait->spec_id, wait->hashes[wait->reached]});
  for (auto at = first; at != last; ++at) {
    if (at->second != id) continue;
    standing_.erase(at);
    break;
  }
  return wait;
}

}  // namespace kv
