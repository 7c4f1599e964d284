#include "node/attachments.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <iterator>

namespace kv {

int Attachments::offer(size_t most) {
  if (!ready_) ready_.reset(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!ready_) return errno;
  most_ = most;
  return 0;
}

Attachments::Entry* Attachments::find(uint64_t session) {
  const auto found = entries_.find(session);
  return found == entries_.end() ? nullptr : &found->second;
}

void Attachments::push(AttachEvent event) {
  events_.push_back(std::move(event));
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(ready_.get(), &one, sizeof one);
}

void Attachments::ask(uint64_t session, uint64_t request_id, uint32_t rail, std::string_view card) {
  entries_.try_emplace(session, Entry{request_id, Phase::kQueued, std::nullopt});
  push({session, true, rail, std::string(card)});
}

std::vector<AttachEvent> Attachments::take_events() {
  uint64_t count;
  [[maybe_unused]] const ssize_t got = read(ready_.get(), &count, sizeof count);
  std::vector<AttachEvent> taken(std::make_move_iterator(events_.begin()),
                                 std::make_move_iterator(events_.end()));
  events_.clear();
  for (const AttachEvent& event : taken)
    if (Entry* entry = find(event.session); entry != nullptr && entry->phase == Phase::kQueued)
      entry->phase = Phase::kTaken;
  return taken;
}

std::optional<uint64_t> Attachments::attached(uint64_t session) {
  Entry* const entry = find(session);
  if (entry == nullptr || entry->phase != Phase::kTaken) return std::nullopt;
  entry->phase = Phase::kAttached;
  return entry->request_id;
}

std::optional<uint64_t> Attachments::refused(uint64_t session) {
  const Entry* const entry = find(session);
  if (entry == nullptr || entry->phase != Phase::kTaken) return std::nullopt;
  const uint64_t request_id = entry->request_id;
  entries_.erase(session);
  return request_id;
}

bool Attachments::ended(uint64_t session) {
  Entry* const entry = find(session);
  if (entry == nullptr || entry->phase == Phase::kEnded) return false;
  if (entry->phase == Phase::kQueued) {  // the host has never heard of it
    std::erase_if(events_, [session](const AttachEvent& event) { return event.session == session; });
    entries_.erase(session);
    return false;
  }
  entry->phase = Phase::kEnded;
  push({session, false, 0, {}});
  return true;
}

void Attachments::fence_with(uint64_t session, uint64_t fence) {
  if (Entry* const entry = find(session)) entry->fence = fence;
}

std::optional<uint64_t> Attachments::fenced(uint64_t session) {
  const auto found = entries_.find(session);
  if (found == entries_.end() || found->second.phase != Phase::kEnded) return std::nullopt;
  const std::optional<uint64_t> fence = found->second.fence;
  entries_.erase(found);
  // It may not have heard yet that it was to end it.
  std::erase_if(events_, [session](const AttachEvent& event) { return event.session == session; });
  return fence;
}

}  // namespace kv
