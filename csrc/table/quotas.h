// How much of a pool each tenant may use, and which block is evicted when it is full.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "table/eviction/policy.h"

namespace kv {

struct TenantUse {
  uint64_t used_bytes = 0;  // of its slots, in whole granules, until they are released
  uint64_t held_bytes = 0;  // of blocks that cannot be evicted; counted if tenants have limits
  uint64_t pins = 0;        // a block pinned twice counts twice
  uint64_t blocks = 0;
  uint64_t evictions = 0;  // because the pool was full
};

// The pool is divided into shares: one for each tenant with a quota, as large as that, and one for
// all others together, of the rest. Each share has an eviction policy of its own.
//
// A share is guaranteed, not a limit: while the pool has room any tenant may use it. When it is
// full, a tenant within its share takes room from the share that exceeds its size most; a tenant
// beyond its share replaces blocks of its own share.
//
// With several tenants none may hold (keep from eviction) more than its share, and none of those
// without a quota more than kHeldPart of theirs, so that the room can be taken back.
class Quotas {
 public:
  // Of the share of the tenants without a quota.
  static constexpr uint64_t kHeldPart = 7, kHeldWhole = 8;

  // `policy`: one of kEvictionPolicies. `quota_bytes` of tenants 1, 2, ... (0: none), together at
  // most `pool_bytes`; `most_pins` of each. Without tenants one share is all of the pool.
  explicit Quotas(std::string_view policy, uint64_t pool_bytes = 0,
                  const std::vector<uint64_t>& quota_bytes = {}, uint64_t most_pins = UINT64_MAX);

  // Blocks of this spec belong to the tenant. Those of other specs belong to tenant 0.
  void own(uint32_t spec_id, uint32_t tenant);
  uint32_t tenant_of(uint32_t spec_id) const {
    return spec_id < tenant_by_spec_.size() ? tenant_by_spec_[spec_id] : 0;
  }
  EvictionPolicy& policy_of(uint32_t tenant) {
    Share& share = shares_[tenants_[tenant].share];
    return share.policy != nullptr ? *share.policy : begin(share);
  }
  void set_now(double now_s);

  // The next block to evict for `bytes` of this tenant; null if none may be evicted.
  Block* victim(uint32_t tenant, uint64_t bytes);

  void took(uint32_t tenant, uint64_t bytes) {
    tenants_[tenant].use.used_bytes += bytes;
    shares_[tenants_[tenant].share].used += bytes;
  }
  void gave(uint32_t tenant, uint64_t bytes) {
    tenants_[tenant].use.used_bytes -= bytes;
    shares_[tenants_[tenant].share].used -= bytes;
  }
  // The tenant holds `bytes` more; modulo 2^64.
  void hold(uint32_t tenant, uint64_t bytes) {
    tenants_[tenant].use.held_bytes += bytes;
    shares_[tenants_[tenant].share].held += bytes;
  }
  TenantUse& use(uint32_t tenant) { return tenants_[tenant].use; }
  const TenantUse& use(uint32_t tenant) const { return tenants_[tenant].use; }

  // Whether held bytes are counted and limited: there are several tenants.
  bool limited() const { return limited_; }
  // Whether the tenant may hold `more_bytes` more, and is within its limit of pins.
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

  std::string policy_;
  bool limited_ = false;
  uint64_t most_pins_ = UINT64_MAX;
  double now_s_ = 0;
  std::vector<uint32_t> tenant_by_spec_;
  std::vector<Tenant> tenants_;
  std::vector<Share> shares_;                      // the first: of the tenants without a quota
  std::vector<std::pair<uint64_t, size_t>> over_;  // scratch: excess, index of the share
};

}  // namespace kv
