// A random life of a journal beside a model of it that cannot go wrong.
#pragma once

#include <poll.h>

#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "check.h"
#include "disk/journal/files.h"
#include "disk/journal/journal.h"

inline constexpr uint32_t kGranule = 4096;
inline constexpr uint64_t kGranules = 64;

inline kv::wire::Hash hash_of(uint64_t number) {
  kv::wire::Hash hash{};
  std::memcpy(hash.bytes, &number, sizeof number);
  return hash;
}

inline kv::DiskGeometry geometry(uint64_t data_id = 7) {
  return {data_id, kGranules * kGranule, kGranule};
}

inline void await(kv::DiskJournal& journal) {
  pollfd watched{journal.completion_fd(), POLLIN, 0};
  CHECK(poll(&watched, 1, 20'000) == 1);
  journal.on_completion();
}

// Until all that was appended is durable.
inline void settle(kv::DiskJournal& journal) {
  journal.flush();
  while (journal.durable() < journal.appended()) await(journal);
}

using Entries = std::map<uint64_t, kv::DiskEntry>;

// What was asked of a journal, in order.
struct Change {
  uint64_t sequence = 0;
  kv::DiskEntry entry;  // to put; or, of a removal, its spec, hash and part
  bool removal = false;
  bool all_parts = false;
};

inline void apply(Entries& entries, const Change& change) {
  const auto same = [&](const auto& each) {
    const kv::DiskEntry& other = each.second;
    return other.spec == change.entry.spec && other.hash == change.entry.hash &&
           (change.all_parts || other.part == change.entry.part);
  };
  std::erase_if(entries, same);
  if (!change.removal) entries[change.entry.offset] = change.entry;
}

// Drives a journal as a tier does: an extent is used again when its removal is durable.
class History {
 public:
  History(kv::DiskJournal& journal, uint64_t seed, Entries found = {})
      : journal_(journal), random_(seed), before_(found), live_(std::move(found)) {
    for (uint32_t tenant = 0; tenant < 2; ++tenant) {
      const uint32_t spec = journal.spec_number(std::string(tenant, 't'), hash_of(1));
      for (uint64_t granules = 1; granules <= 2; ++granules)
        parts_.push_back({spec,
                          journal.part_number(spec, hash_of(granules), granules * kGranule - 100),
                          granules});
    }
  }

  void step() {
    learn();
    switch (random_() % 12) {
      case 0:
      case 1:
      case 2:
      case 3: return put();
      case 4:
      case 5: return remove();
      case 6:
      case 7: return journal_.flush();
      case 8:
        journal_.flush();
        if (journal_.error() == 0 && journal_.backlog_bytes() != 0) await(journal_);
        return;
      case 9:
        if (journal_.begin_compaction()) unseen_ = live_;
        return;
      default: return snapshot();
    }
  }

  void put() {
    const auto [spec, part, granules] = parts_[random_() % parts_.size()];
    const auto offset = find_extent(granules);
    if (!offset) return;
    kv::DiskEntry entry{spec, part, hash_of(random_() % 20), std::nullopt, *offset,
                        granules * kGranule - 100, static_cast<uint32_t>(random_()), 0};
    if (random_() % 2 == 0) entry.parent = hash_of(random_() % 20);
    // What it takes the place of lies where it lies until this is durable.
    const uint64_t sequence = journal_.put(entry);
    if (sequence == 0) return;
    entry.sequence = sequence;
    change({sequence, entry, false, false});
  }

  void remove() {
    if (live_.empty()) return;
    auto at = live_.begin();
    std::advance(at, static_cast<long>(random_() % live_.size()));
    const kv::DiskEntry entry = at->second;
    const bool all = random_() % 2 == 0;
    const auto part = all ? std::nullopt : std::optional(entry.part);
    change({journal_.remove(entry.spec, entry.hash, part), entry, true, all});
  }

  void snapshot() {
    if (!journal_.compacting()) return;
    for (int i = 0; i < 5 && !unseen_.empty(); ++i) {
      const kv::DiskEntry entry = unseen_.begin()->second;
      unseen_.erase(unseen_.begin());
      const auto still = live_.find(entry.offset);
      if (still != live_.end() && still->second == entry) journal_.snapshot(entry);
    }
    if (unseen_.empty()) journal_.end_snapshot();
  }

  void learn() {
    journal_.on_completion();
    while (!leaving_.empty() && leaving_.begin()->first <= journal_.durable())
      leaving_.erase(leaving_.begin());
  }

  // Whether what a journal says can be what is left of this one: all that was durable, and then
  // nothing, or a prefix of the rest. Then this is what there is.
  bool explains(const Entries& found, uint64_t durable) const {
    Entries entries = before_;
    size_t next = 0;
    for (; next < changes_.size() && changes_[next].sequence <= durable; ++next)
      apply(entries, changes_[next]);
    while (entries != found && next < changes_.size()) apply(entries, changes_[next++]);
    return entries == found;
  }

  const Entries& live() const { return live_; }
  const std::vector<Change>& changes() const { return changes_; }

 private:
  struct Part {
    uint32_t spec, number;
    uint64_t granules;
  };

  void change(const Change& change) {
    Entries after = live_;
    apply(after, change);
    for (const auto& [offset, entry] : live_)
      if (const auto at = after.find(offset); at == after.end() || at->second != entry)
        leaving_.emplace(change.sequence, entry);
    live_ = std::move(after);
    changes_.push_back(change);
  }

  std::optional<uint64_t> find_extent(uint64_t granules) {
    std::set<uint64_t> used;
    const auto use = [&](const kv::DiskEntry& entry) {
      for (uint64_t at = 0; at < entry.bytes; at += kGranule) used.insert(entry.offset + at);
    };
    for (const auto& [_, entry] : live_) use(entry);
    for (const auto& [_, entry] : leaving_) use(entry);
    for (int tries = 0; tries < 8; ++tries) {
      const uint64_t first = random_() % (kGranules - granules + 1);
      bool free = true;
      for (uint64_t i = 0; i < granules; ++i) free &= !used.contains((first + i) * kGranule);
      if (free) return first * kGranule;
    }
    return std::nullopt;
  }

  kv::DiskJournal& journal_;
  std::mt19937_64 random_;
  std::vector<Part> parts_;
  Entries before_, live_;
  std::vector<Change> changes_;
  std::multimap<uint64_t, kv::DiskEntry> leaving_;  // by the sequence that lets their extents go
  Entries unseen_;                                  // of a snapshot
};
