// Who may use a node: tenants and their tokens. Knows neither sockets nor files.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "wire/wire.h"

namespace kv {

struct TenantOptions {
  std::string name;
  std::string token;
  uint64_t quota_bytes = 0;  // 0: none
};

// Who they are never changes; their tokens may. Of those it keeps only digests.
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
  // Of one: "" for 0, which is whoever a node without tokens serves.
  std::string_view name(uint32_t tenant) const {
    return tenant == 0 ? std::string_view() : std::string_view(names_[tenant - 1]);
  }
  // Takes the tokens as they are now, in any order: which of 1, 2, ... have another one than before.
  // Nothing, and all stays as it was, where these are not the same tenants.
  std::optional<std::vector<uint32_t>> follow(const std::vector<TenantOptions>& options);
  // The tenant of this name, where the node has it: 0 only where it is open.
  std::optional<uint32_t> by_name(std::string_view name) const;

 private:
  std::vector<wire::Hash> digests_;
  std::vector<std::string> names_;
  std::vector<uint64_t> quotas_;
};

}  // namespace kv
