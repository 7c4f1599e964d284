#include "eviction.h"

#include "prefix_lru.h"
#include "reuse_density.h"
#include "s3_fifo.h"

namespace kv {

const std::vector<std::string_view>& eviction_policies() {
  static const std::vector<std::string_view> names = {"density", "lru", "s3fifo"};
  return names;
}

std::unique_ptr<EvictionPolicy> make_eviction_policy(std::string_view name) {
  if (name == "density") return std::make_unique<ReuseDensity>();
  if (name == "lru") return std::make_unique<PrefixLru>();
  if (name == "s3fifo") return std::make_unique<S3Fifo>();
  return nullptr;
}

}  // namespace kv
