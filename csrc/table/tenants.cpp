#include "table/tenants.h"

#include "digest/sha256.h"

namespace kv {
namespace {

static_assert(kSha256Bytes == wire::kHashBytes);

wire::Hash digest_of(std::string_view token) {
  wire::Hash digest;
  sha256(token.data(), token.size(), digest.bytes);
  return digest;
}

// All ones if they are equal, else zero; without a branch.
uint32_t equal_mask(const wire::Hash& a, const wire::Hash& b) {
  volatile uint8_t differ = 0;  // volatile: no compiler may stop at the first difference
  for (size_t i = 0; i < wire::kHashBytes; ++i)
    differ = static_cast<uint8_t>(differ | (a.bytes[i] ^ b.bytes[i]));
  return 0u - ((uint32_t{differ} - 1u) >> 31);
}

}  // namespace

Tenants::Tenants(const std::vector<TenantOptions>& options) {
  for (const TenantOptions& one : options) {
    digests_.push_back(digest_of(one.token));
    names_.push_back(one.name);
    quotas_.push_back(one.quota_bytes);
  }
}

std::optional<std::vector<uint32_t>> Tenants::follow(const std::vector<TenantOptions>& options) {
  std::vector<wire::Hash> digests = digests_;
  std::vector<bool> named(digests.size());
  for (const TenantOptions& one : options) {
    const std::optional<uint32_t> tenant = by_name(one.name);
    if (!tenant || *tenant == 0 || named[*tenant - 1]) return std::nullopt;
    named[*tenant - 1] = true;
    digests[*tenant - 1] = digest_of(one.token);
  }
  if (options.size() != digests.size()) return std::nullopt;
  std::vector<uint32_t> changed;
  for (uint32_t i = 0; i < digests.size(); ++i)
    if (equal_mask(digests[i], digests_[i]) == 0) changed.push_back(i + 1);
  digests_ = std::move(digests);
  return changed;
}

std::optional<uint32_t> Tenants::by_name(std::string_view name) const {
  if (name.empty()) return open() ? std::optional<uint32_t>(0) : std::nullopt;
  const auto found = std::find(names_.begin(), names_.end(), name);
  if (found == names_.end()) return std::nullopt;
  return static_cast<uint32_t>(found - names_.begin()) + 1;
}

std::optional<uint32_t> Tenants::find(std::string_view token) const {
  if (open()) return 0;
  const wire::Hash given = digest_of(token);
  uint32_t found = 0;
  for (uint32_t i = 0; i < digests_.size(); ++i) found |= equal_mask(given, digests_[i]) & (i + 1);
  if (found == 0) return std::nullopt;
  return found;
}

}  // namespace kv
