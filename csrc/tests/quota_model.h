// What docs/store-security.md says of quotas, done the slow way: to hold the table to it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "wire/wire.h"

namespace kv::test {

using wire::BlockStatus;

// Blocks of one size in a list, the one that was used longest ago first.
struct QuotaModel {
  struct Entry {
    uint32_t tenant, i;
    std::optional<uint32_t> parent;
    uint32_t pins = 0;
    bool reserved = false;
  };
  QuotaModel(uint64_t blocks, std::vector<uint64_t> quota_blocks)
      : pool(blocks), quotas(std::move(quota_blocks)) {}

  uint32_t share_of(uint32_t tenant) const { return quotas[tenant - 1] == 0 ? 0 : tenant; }
  uint64_t share_blocks(uint32_t share) const {
    if (share != 0) return quotas[share - 1];
    uint64_t left = pool;
    for (const uint64_t quota : quotas) left -= quota;
    return left;
  }
  Entry* find(uint32_t tenant, uint32_t i) {
    for (Entry& e : entries)
      if (e.tenant == tenant && e.i == i) return &e;
    return nullptr;
  }
  uint64_t used(uint32_t share) const {
    return static_cast<uint64_t>(std::count_if(entries.begin(), entries.end(), [&](const Entry& e) {
      return share_of(e.tenant) == share;
    }));
  }
  bool has_child(const Entry& e) const {
    return std::any_of(entries.begin(), entries.end(), [&](const Entry& other) {
      return other.tenant == e.tenant && other.parent == e.i;
    });
  }
  bool is_held(const Entry& e) const {
    if (e.pins != 0 || e.reserved) return true;
    return std::any_of(entries.begin(), entries.end(), [&](const Entry& other) {
      return other.tenant == e.tenant && other.parent == e.i && is_held(other);
    });
  }
  uint64_t held(uint32_t tenant) const {
    return static_cast<uint64_t>(std::count_if(entries.begin(), entries.end(), [&](const Entry& e) {
      return e.tenant == tenant && is_held(e);
    }));
  }
  uint64_t held_by_share(uint32_t share) const {
    uint64_t sum = 0;
    for (uint32_t tenant = 1; tenant <= quotas.size(); ++tenant)
      if (share_of(tenant) == share) sum += held(tenant);
    return sum;
  }
  bool may_hold(uint32_t tenant, uint64_t more) const {
    const uint32_t share = share_of(tenant);
    const uint64_t most = share_blocks(share);
    const uint64_t own = share == 0 ? most * 7 : most * 8;
    return (held(tenant) + more) * 8 <= own && held_by_share(share) + more <= most;
  }
  void hit(Entry* e) {
    const Entry copy = *e;
    entries.erase(entries.begin() + (e - entries.data()));
    entries.push_back(copy);
  }
  bool evict_of(uint32_t share) {
    for (auto at = entries.begin(); at != entries.end(); ++at) {
      if (share_of(at->tenant) != share || has_child(*at) || at->pins != 0 || at->reserved) continue;
      entries.erase(at);
      return true;
    }
    return false;
  }
  bool make_room(uint32_t tenant) {
    const uint32_t own = share_of(tenant);
    if (used(own) + 1 <= share_blocks(own)) {
      std::vector<std::pair<uint64_t, uint32_t>> over;
      for (uint32_t share = 0; share <= quotas.size(); ++share)
        if (share != own && used(share) > share_blocks(share))
          over.emplace_back(used(share) - share_blocks(share), share);
      std::sort(over.rbegin(), over.rend());
      for (const auto& [by, share] : over)
        if (evict_of(share)) return true;
    }
    return evict_of(own);
  }
  BlockStatus reserve(uint32_t tenant, uint32_t i, std::optional<uint32_t> parent) {
    if (Entry* e = find(tenant, i)) {
      if (e->reserved) return BlockStatus::kBusy;
      return hit(e), BlockStatus::kExists;
    }
    const Entry writing{tenant, i, parent, 0, true};
    entries.push_back(writing);  // it is held from here on, and so is what it hangs on
    bool granted = may_hold(tenant, 0);
    entries.pop_back();
    Entry* above = parent ? find(tenant, *parent) : nullptr;
    if (above != nullptr) ++above->pins;
    while (granted && entries.size() == pool) granted = make_room(tenant);
    if (parent && (above = find(tenant, *parent)) != nullptr) --above->pins;
    if (granted) entries.push_back(writing);
    return granted ? BlockStatus::kGranted : BlockStatus::kNoSpace;
  }

  uint64_t pool;
  std::vector<uint64_t> quotas;
  std::vector<Entry> entries;
};

}  // namespace kv::test
