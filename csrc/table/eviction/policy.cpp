#include "table/eviction/policy.h"

#include "table/eviction/density.h"
#include "table/eviction/lru.h"

namespace kv {

const std::vector<std::string_view>& eviction_policies() {
  static const std::vector<std::string_view> names = {"density", "lru"};
  return names;
}

std::unique_ptr<EvictionPolicy> make_eviction_policy(std::string_view name) {
  if (name == "density") return std::make_unique<ReuseDensity>();
  if (name == "lru") return std::make_unique<PrefixLru>();
  return nullptr;
}

}  // namespace kv
