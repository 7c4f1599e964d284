#include "disk/journal/names.h"

namespace kv {
namespace {

std::string bytes_of(const wire::Hash& digest) {
  return {reinterpret_cast<const char*>(digest.bytes), sizeof digest.bytes};
}

// Unique keys. Digests have a fixed length, so the rest is unambiguous.
std::string key_of(const wire::Hash& digest, std::string_view tenant) {
  return bytes_of(digest).append(tenant);
}
std::string key_of(const wire::Hash& digest, uint32_t spec, uint64_t bytes) {
  return bytes_of(digest) + std::to_string(spec) + "/" + std::to_string(bytes);
}

// The highest plus one; if that is too high, the lowest free one.
template <class Named> uint32_t free_number(const std::map<uint32_t, Named>& taken, uint32_t most) {
  if (taken.empty()) return 1;
  if (taken.rbegin()->first < most) return taken.rbegin()->first + 1;
  uint32_t number = 1;
  for (const auto& [each, _] : taken)
    if (each == number) ++number;
  return number <= most ? number : 0;
}

template <class Named> const Named* find(const std::map<uint32_t, Named>& in, uint32_t number) {
  const auto at = in.find(number);
  return at == in.end() ? nullptr : &at->second;
}

}  // namespace

bool DiskNames::add(const DiskSpec& spec) {
  if (spec.number == 0 || spec.number > kMaxSpecs || specs_.contains(spec.number)) return false;
  if (spec.tenant.size() > kMaxTenantBytes) return false;
  if (!spec_numbers_.emplace(key_of(spec.digest, spec.tenant), spec.number).second) return false;
  specs_.emplace(spec.number, spec);
  return true;
}

bool DiskNames::add(const DiskPart& part) {
  if (part.number == 0 || part.number > kMaxParts || parts_.contains(part.number)) return false;
  if (part.bytes == 0 || !specs_.contains(part.spec)) return false;
  const std::string key = key_of(part.digest, part.spec, part.bytes);
  if (!part_numbers_.emplace(key, part.number).second) return false;
  parts_.emplace(part.number, part);
  return true;
}

uint32_t DiskNames::spec_number(std::string_view tenant, const wire::Hash& digest) {
  const auto known = spec_numbers_.find(key_of(digest, tenant));
  if (known != spec_numbers_.end()) return known->second;
  const uint32_t number = free_number(specs_, kMaxSpecs);
  return add(DiskSpec{number, std::string(tenant), digest}) ? number : 0;
}

uint32_t DiskNames::part_number(uint32_t spec, const wire::Hash& digest, uint64_t bytes) {
  const auto known = part_numbers_.find(key_of(digest, spec, bytes));
  if (known != part_numbers_.end()) return known->second;
  const uint32_t number = free_number(parts_, kMaxParts);
  return add(DiskPart{number, spec, digest, bytes}) ? number : 0;
}

const DiskSpec* DiskNames::spec(uint32_t number) const { return find(specs_, number); }
const DiskPart* DiskNames::part(uint32_t number) const { return find(parts_, number); }

}  // namespace kv
