// Who may have how much of a pool, and whose block goes when it is full. Knows neither the table's
// blocks by name nor their bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "table/eviction/policy.h"

namespace kv {

// What one tenant has of a pool, and what became of its blocks.
struct TenantUse {
  uint64_t used_bytes = 0;  // of its slots, in whole granules, until they are released
  uint64_t held_bytes = 0;  // of its blocks that cannot go; counted where tenants have limits
  uint64_t pins = 0;        // a block pinned twice counts twice
  uint64_t blocks = 0;
  uint64_t evictions = 0;  // for want of room
};

// The pool is cut into shares: one for each tenant with a quota, as large as that, and one that
// all others have together, of what is left. Each share has a policy of its own that ranks its
// blocks.
//
// A share is what can be counted on, not where it ends: while the pool has room anybody may use it.
// When it has none, a writer whose share the new block stays within takes room from the share that
// is furthest over; any other replaces blocks of its own share, and of no other.
//
// With several tenants none may hold (keep from going) more than its share, and none of those
// without a quota more than kHeldPart of theirs, so that what was lent can be taken back.
class Quotas {
 public:
  using MakePolicy = std::function<std::unique_ptr<EvictionPolicy>()>;
  // Of what those without a quota have together.
  static constexpr uint64_t kHeldPart = 7, kHeldWhole = 8;

  // One share, which is everybody's and all of the pool; nothing is limited.
  explicit Quotas(std::unique_ptr<EvictionPolicy> policy);
  // `quota_bytes` of tenants 1, 2, ...; 0 for none. Together at most `pool_bytes`. `most_pins`: of
  // each tenant.
  Quotas(uint64_t pool_bytes, const std::vector<uint64_t>& quota_bytes, MakePolicy make,
         uint64_t most_pins = UINT64_MAX);

  // From now on blocks of the spec are the tenant's. What was never said is tenant 0's: everybody's.
  void own(uint32_t spec_id, uint32_t tenant);
  uint32_t tenant_of(uint32_t spec_id) const {
    return spec_id < tenant_by_spec_.size() ? tenant_by_spec_[spec_id] : 0;
  }
  EvictionPolicy& policy_of(uint32_t tenant) {
    Share& share = shares_[tenants_[tenant].share];
    return share.policy != nullptr ? *share.policy : begin(share);
  }
  void set_now(double now_s);

  // The next block to go for one of `bytes` of this tenant; null if none may.
  Block* victim(uint32_t tenant, uint64_t bytes);

  void took(uint32_t tenant, uint64_t bytes) {
    tenants_[tenant].use.used_bytes += bytes;
    shares_[tenants_[tenant].share].used += bytes;
  }
  void gave(uint32_t tenant, uint64_t bytes) {
    tenants_[tenant].use.used_bytes -= bytes;
    shares_[tenants_[tenant].share].used -= bytes;
  }
  void hold(uint32_t tenant, uint64_t bytes) {
    tenants_[tenant].use.held_bytes += bytes;
    shares_[tenants_[tenant].share].held += bytes;
  }
  void let_go(uint32_t tenant, uint64_t bytes) {
    tenants_[tenant].use.held_bytes -= bytes;
    shares_[tenants_[tenant].share].held -= bytes;
  }
  TenantUse& use(uint32_t tenant) { return tenants_[tenant].use; }
  const TenantUse& use(uint32_t tenant) const { return tenants_[tenant].use; }

  // Whether what is held is counted and bounded: there are several tenants.
  bool limited() const { return limited_; }
  // Whether the tenant may hold so many bytes more than it does, and has no more pins than it may.
  bool within_limits(uint32_t tenant, uint64_t more_bytes = 0) const;

 private:
  struct Tenant {
    uint32_t share = 0;
    uint64_t most_held = UINT64_MAX;
    TenantUse use;
  };
  struct Share {
    uint64_t bytes = 0;
    uint64_t used = 0;
    uint64_t held = 0;
    std::unique_ptr<EvictionPolicy> policy;  // made with its first block
  };
  EvictionPolicy& begin(Share& share);
  Block* victim_of_others(const Share& own);

  MakePolicy make_;
  bool limited_ = false;
  uint64_t most_pins_ = UINT64_MAX;
  double now_s_ = 0;
  std::vector<uint32_t> tenant_by_spec_;
  std::vector<Tenant> tenants_;
  std::vector<Share> shares_;  // the first: of those without a quota
  std::vector<std::pair<uint64_t, size_t>> over_;  // scratch: by how much, which share
};

}  // namespace kv
