#include "tenants.h"

#include <algorithm>

#include "sha256.h"

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
