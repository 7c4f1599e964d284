#include "table/quotas.h"

#include <algorithm>

namespace kv {

Quotas::Quotas(std::string_view policy, uint64_t pool_bytes,
               const std::vector<uint64_t>& quota_bytes, uint64_t most_pins)
    : policy_(policy), limited_(quota_bytes.size() > 1), most_pins_(most_pins),
      tenants_(quota_bytes.size() + 1), shares_(1) {
  uint64_t left = pool_bytes;
  for (size_t i = 0; i < quota_bytes.size(); ++i) {
    if (quota_bytes[i] == 0) continue;
    Share share;
    share.bytes = std::min(quota_bytes[i], left);
    left -= share.bytes;
    tenants_[i + 1].share = static_cast<uint32_t>(shares_.size());
    tenants_[i + 1].most_held = share.bytes;
    shares_.push_back(std::move(share));
  }
  shares_[0].bytes = left;
  for (Tenant& tenant : tenants_)
    if (tenant.share == 0) tenant.most_held = left / kHeldWhole * kHeldPart;
}

void Quotas::own(uint32_t spec_id, uint32_t tenant) {
  if (spec_id >= tenant_by_spec_.size()) tenant_by_spec_.resize(spec_id + 1, 0);
  tenant_by_spec_[spec_id] = tenant;
}

EvictionPolicy& Quotas::begin(Share& share) {
  share.policy = make_eviction_policy(policy_);
  share.policy->set_now(now_s_);
  return *share.policy;
}

void Quotas::set_now(double now_s) {
  now_s_ = now_s;
  for (const Share& share : shares_)
    if (share.policy != nullptr) share.policy->set_now(now_s);
}

Block* Quotas::victim(uint32_t tenant, uint64_t bytes) {
  const Share& own = shares_[tenants_[tenant].share];
  if (shares_.size() > 1 && own.used + bytes <= own.bytes)
    if (Block* block = victim_of_others(own)) return block;
  return own.policy == nullptr ? nullptr : own.policy->victim();
}

// From the share that exceeds its size most; if all of that is held, from the next one.
Block* Quotas::victim_of_others(const Share& own) {
  over_.clear();
  for (size_t i = 0; i < shares_.size(); ++i)
    if (&shares_[i] != &own && shares_[i].used > shares_[i].bytes && shares_[i].policy != nullptr)
      over_.emplace_back(shares_[i].used - shares_[i].bytes, i);
  std::sort(over_.begin(), over_.end(), std::greater<>());
  for (const auto& [by, i] : over_)
    if (Block* block = shares_[i].policy->victim()) return block;
  return nullptr;
}

bool Quotas::within_limits(uint32_t tenant, uint64_t more_bytes) const {
  if (!limited_) return true;
  const Tenant& one = tenants_[tenant];
  const Share& share = shares_[one.share];
  return one.use.held_bytes + more_bytes <= one.most_held &&
         share.held + more_bytes <= share.bytes && one.use.pins <= most_pins_;
}

}  // namespace kv
