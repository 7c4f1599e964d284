// Who may use a node: tenants and their tokens. Knows neither sockets nor files.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "wire.h"

namespace kv {

struct TenantOptions {
  std::string name;
  std::string token;
  uint64_t quota_bytes = 0;  // 0: none
};

// Never changes. Of the tokens it keeps only digests.
class Tenants {
 public:
  Tenants() = default;
  explicit Tenants(const std::vector<TenantOptions>& options);

  // Nobody is asked for a token.
  bool open() const { return digests_.empty(); }
  size_t count() const { return digests_.size(); }
  // Of the tenants 1, 2, ...
  const std::vector<std::string>& names() const { return names_; }
  const std::vector<uint64_t>& quotas() const { return quotas_; }
  // The tenant whose token this is, counted from 1; 0 for everybody where the node is open; else
  // nothing. How long it takes tells nothing of the tokens: digests are compared, all of them, to
  // their last byte.
  std::optional<uint32_t> find(std::string_view token) const;

 private:
  std::vector<wire::Hash> digests_;
  std::vector<std::string> names_;
  std::vector<uint64_t> quotas_;
};

}  // namespace kv
