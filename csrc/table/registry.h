// What engines have registered: specs, parts and manifests, and their small ids.
#pragma once

#include <map>
#include <string>
#include <unordered_set>

#include "table/table.h"
#include "wire/wire.h"

namespace kv {

struct ManifestPart {
  uint32_t part_id = 0;
  uint64_t bytes = 0;
};

struct Manifest {
  uint32_t id = 0;
  uint32_t tenant = 0;
  uint32_t spec_id = 0;
  Hash digest{};
  std::string doc;
  std::vector<ManifestPart> parts;  // in the manifest's order
  PartIds part_ids;                 // ascending
};

// Entries live as long as the server. Tenants share kMaxBytes of them, with kLeastBytes for each: an
// engine registers another manifest each time its weights change.
//
// Invariant: entries and ids belong to one tenant. Two tenants that register the same spec get two
// spec ids, so that they have no block key in common.
class Registry {
 public:
  static constexpr uint64_t kMaxBytes = 64u << 20;
  static constexpr uint64_t kLeastBytes = 1u << 20;
  static constexpr uint64_t kBytesBeside = 1024;  // what a manifest takes beside doc and parts

  // Each of the `tenants` may register an equal share.
  explicit Registry(size_t tenants = 1);

  struct Outcome {
    wire::Status status = wire::Status::kOk;
    const Manifest* manifest = nullptr;  // if kOk
  };
  // The same digest gives the same manifest. CONFLICT: a part digest is known with another size, or
  // the manifest digest with other parts. BAD_REQUEST: no part, or one that is empty, larger than
  // `most_part_bytes`, or listed twice. LIMIT.
  Outcome add(uint32_t tenant, const wire::RegisterRequest& request, uint64_t most_part_bytes);

  // Restores an id from before the restart, for an engine that registers the same again; without
  // `tenant`, it is only not used again. Ignored if the name has another id already.
  void restore_spec(std::optional<uint32_t> tenant, const Hash& digest, uint32_t id);
  void restore_part(uint32_t spec_id, const Hash& digest, uint64_t bytes, uint32_t id);

  // Null for an unknown id and for that of another tenant.
  const Manifest* find(uint32_t tenant, uint32_t id) const;
  std::unordered_set<uint32_t> specs_of(uint32_t tenant) const;
  const std::vector<Manifest>& manifests() const { return manifests_; }

 private:
  struct KnownPart {
    uint32_t id = 0;
    uint64_t bytes = 0;
  };
  wire::Status check(uint32_t tenant, const wire::RegisterRequest& request,
                     uint64_t most_part_bytes) const;
  bool agrees(const Manifest& known, const wire::RegisterRequest& request) const;

  uint64_t most_each_;  // bytes
  uint32_t last_spec_ = 0, last_part_ = 0;           // the last ids in use
  std::vector<Manifest> manifests_;                  // id i is at i - 1
  std::unordered_map<uint32_t, uint64_t> bytes_of_;  // of manifests, by tenant
  // Keyed by tenant and digest; spec_id of the key is the tenant.
  std::unordered_map<BlockKey, uint32_t, BlockKeyHash> manifest_ids_;
  std::unordered_map<BlockKey, uint32_t, BlockKeyHash> spec_ids_;
  std::unordered_map<BlockKey, KnownPart, BlockKeyHash> parts_;  // keyed by spec id and digest
};

}  // namespace kv
