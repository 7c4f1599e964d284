#include "table/registry.h"

#include <algorithm>

namespace kv {

using wire::Status;

Registry::Registry(size_t tenants)
    : most_each_(std::max(kMaxBytes / std::max<uint64_t>(tenants, 1), kLeastBytes)) {}

const Manifest* Registry::find(uint32_t tenant, uint32_t id) const {
  if (id == 0 || id > manifests_.size()) return nullptr;
  const Manifest& manifest = manifests_[id - 1];
  return manifest.tenant == tenant ? &manifest : nullptr;
}

std::unordered_set<uint32_t> Registry::specs_of(uint32_t tenant) const {
  std::unordered_set<uint32_t> specs;
  for (const auto& [key, id] : spec_ids_)
    if (key.spec_id == tenant) specs.insert(id);
  return specs;
}

Status Registry::check(uint32_t tenant, const wire::RegisterRequest& request,
                       uint64_t most_part_bytes) const {
  if (request.parts.empty()) return Status::kBadRequest;
  const auto spec = spec_ids_.find({tenant, request.spec});
  std::vector<Hash> digests;
  for (const wire::PartSpec& part : request.parts) {
    if (part.bytes == 0 || part.bytes > most_part_bytes) return Status::kBadRequest;
    digests.push_back(part.digest);
    if (spec == spec_ids_.end()) continue;
    const auto known = parts_.find({spec->second, part.digest});
    if (known != parts_.end() && known->second.bytes != part.bytes) return Status::kConflict;
  }
  std::sort(digests.begin(), digests.end());
  const bool twice = std::adjacent_find(digests.begin(), digests.end()) != digests.end();
  return twice ? Status::kBadRequest : Status::kOk;
}

bool Registry::agrees(const Manifest& known, const wire::RegisterRequest& request) const {
  const auto spec = spec_ids_.find({known.tenant, request.spec});
  if (spec == spec_ids_.end() || spec->second != known.spec_id ||
      known.parts.size() != request.parts.size())
    return false;
  for (size_t i = 0; i < request.parts.size(); ++i) {
    const auto part = parts_.find({known.spec_id, request.parts[i].digest});
    if (part == parts_.end() || part->second.id != known.parts[i].part_id) return false;
  }
  return true;
}

void Registry::restore_spec(std::optional<uint32_t> tenant, const Hash& digest, uint32_t id) {
  last_spec_ = std::max(last_spec_, id);
  if (tenant) spec_ids_.try_emplace({*tenant, digest}, id);
}

void Registry::restore_part(uint32_t spec_id, const Hash& digest, uint64_t bytes, uint32_t id) {
  last_part_ = std::max(last_part_, id);
  parts_.try_emplace({spec_id, digest}, KnownPart{id, bytes});
}

Registry::Outcome Registry::add(uint32_t tenant, const wire::RegisterRequest& request,
                                uint64_t most_part_bytes) {
  if (const Status status = check(tenant, request, most_part_bytes); status != Status::kOk)
    return {status, nullptr};
  if (const auto known = manifest_ids_.find({tenant, request.manifest});
      known != manifest_ids_.end()) {
    const Manifest& before = manifests_[known->second - 1];
    return agrees(before, request) ? Outcome{Status::kOk, &before}
                                   : Outcome{Status::kConflict, nullptr};
  }
  const uint64_t bytes =
      kBytesBeside + request.doc.size() + request.parts.size() * sizeof(ManifestPart);
  if (bytes_of_[tenant] + bytes > most_each_) return {Status::kLimit, nullptr};
  const auto [spec, new_spec] = spec_ids_.try_emplace({tenant, request.spec}, last_spec_ + 1);
  if (new_spec) ++last_spec_;
  Manifest manifest{static_cast<uint32_t>(manifests_.size() + 1),
                    tenant,
                    spec->second,
                    request.manifest,
                    std::string(request.doc),
                    {},
                    {}};
  for (const wire::PartSpec& part : request.parts) {
    const KnownPart fresh{last_part_ + 1, part.bytes};
    const auto [known, new_part] = parts_.try_emplace({manifest.spec_id, part.digest}, fresh);
    if (new_part) ++last_part_;
    const KnownPart& entry = known->second;
    manifest.parts.push_back({entry.id, entry.bytes});
    manifest.part_ids.push_back(entry.id);
  }
  std::sort(manifest.part_ids.begin(), manifest.part_ids.end());
  manifest_ids_.emplace(BlockKey{tenant, request.manifest}, manifest.id);
  bytes_of_[tenant] += bytes;
  manifests_.push_back(std::move(manifest));
  return {Status::kOk, &manifests_.back()};
}

}  // namespace kv
