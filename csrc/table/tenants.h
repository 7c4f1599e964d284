// The tenants of a node: their tokens, and what each may have of the node at a time. Its share of
// the pool: table/quotas.h; of manifests: table/registry.h.
#pragma once

#include <algorithm>
#include <limits>
#include <optional>
#include <string>

#include "wire/wire.h"

namespace kv {

struct TenantOptions {
  std::string name;
  std::string token;
  uint64_t quota_bytes = 0;  // 0: none
};

// Limits of one tenant of several, so that it cannot keep the others from being served.
struct TenantLimits {
  // One tenant may have one in so many of the node's connections.
  static constexpr size_t kConnectionsPart = 2;
  // With tokens, connections without an accepted HELLO may be one in so many.
  static constexpr size_t kAwaitingHelloPart = 4;
  static constexpr uint64_t kWaits = 65536;
  // What all tenants together may have, cut into equal parts of at least kLeast.
  static constexpr uint64_t kWaitHashes = 16u << 20, kPins = 16u << 20, kLeast = 256u << 10;

  // Only the limits of each connection.
  size_t connections = std::numeric_limits<size_t>::max();
  uint64_t waits = UINT64_MAX;
  uint64_t wait_hashes = UINT64_MAX;  // of all its waits
  uint64_t pins = UINT64_MAX;         // blocks under leases and in replies on their way

  // A single tenant has no further limits.
  static TenantLimits of(size_t tenants, size_t max_connections) {
    if (tenants <= 1) return {};
    return {std::max<size_t>(max_connections / kConnectionsPart, 1), kWaits,
            std::max(kWaitHashes / tenants, kLeast), std::max(kPins / tenants, kLeast)};
  }
};

// What one tenant has now, and what it was answered.
struct TenantCounts {
  uint64_t connections = 0, waits = 0, wait_hashes = 0;
  uint64_t hits = 0, misses = 0;  // blocks, of MATCH and ACQUIRE
  uint64_t limited = 0;           // requests that a limit of the tenant refused or cut short
};

// Names and tokens. The tenants never change; their tokens may. Of tokens it keeps digests only.
class Tenants {
 public:
  Tenants() = default;
  explicit Tenants(const std::vector<TenantOptions>& options);

  // No token is needed.
  bool open() const { return digests_.empty(); }
  size_t count() const { return digests_.size(); }
  // Of the tenants 1, 2, ...
  const std::vector<std::string>& names() const { return names_; }
  const std::vector<uint64_t>& quotas() const { return quotas_; }
  // The tenant with this token, from 1; 0 if the node is open; else nothing. The time that it takes
  // reveals nothing of the tokens: all digests are compared to their last byte.
  std::optional<uint32_t> find(std::string_view token) const;
  // "" for 0, the tenant of an open node.
  std::string_view name(uint32_t tenant) const {
    return tenant == 0 ? std::string_view() : std::string_view(names_[tenant - 1]);
  }
  // Replaces the tokens, in any order. Returns the tenants whose token has changed. Nothing, and no
  // change, if these are not the same tenants.
  std::optional<std::vector<uint32_t>> follow(const std::vector<TenantOptions>& options);
  // The tenant of this name; 0 for "" if the node is open.
  std::optional<uint32_t> by_name(std::string_view name) const;

 private:
  std::vector<wire::Hash> digests_;
  std::vector<std::string> names_;
  std::vector<uint64_t> quotas_;
};

}  // namespace kv
