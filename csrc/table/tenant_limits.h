// What one tenant of several may have of a node's own means at a time, so that the others are served
// whatever it does. Of the pool: table/quotas.h; of manifests: table/registry.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace kv {

struct TenantLimits {
  // One tenant may have one connection in so many of the node's.
  static constexpr size_t kConnectionsPart = 2;
  // Where there are tokens, connections whose HELLO has not been taken yet may be one in so many.
  static constexpr size_t kStrangersPart = 4;
  static constexpr uint64_t kWaits = 65536;
  // What all tenants together may have, cut into equal parts, but none less than kLeast.
  static constexpr uint64_t kWaitHashes = 16u << 20, kPins = 16u << 20, kLeast = 256u << 10;

  // Nothing is bounded but by what bounds each connection.
  size_t connections = std::numeric_limits<size_t>::max();
  uint64_t waits = UINT64_MAX;
  uint64_t wait_hashes = UINT64_MAX;  // of all its waits
  uint64_t pins = UINT64_MAX;         // blocks under leases and in replies on their way

  // A tenant that is alone takes from nobody.
  static TenantLimits of(size_t tenants, size_t max_connections) {
    if (tenants <= 1) return {};
    return {std::max<size_t>(max_connections / kConnectionsPart, 1), kWaits,
            std::max(kWaitHashes / tenants, kLeast), std::max(kPins / tenants, kLeast)};
  }
};

// What a tenant has of it now, and what it was told.
struct TenantCounts {
  uint64_t connections = 0, waits = 0, wait_hashes = 0;
  uint64_t hits = 0, misses = 0;  // blocks, of MATCH and ACQUIRE
  uint64_t limited = 0;           // requests that a limit of the tenant refused, or cut short
};

}  // namespace kv
