// What engines have registered: specs, parts and manifests, and the small ids that stand for them.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

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

// Ids live as long as the server; what is registered stays. Bounded by kMaxManifests, or by
// kLeastManifests of each tenant where that is more.
//
// Invariant: what one tenant registers, and the ids that stand for it, are no other's. Two tenants
// who register the same spec get two spec ids, so that no name of a block is common to them.
class Registry {
 public:
  static constexpr uint32_t kMaxManifests = 1024;
  static constexpr uint32_t kLeastManifests = 16;

  // `tenants`: how many there can be; each may register its share.
  explicit Registry(size_t tenants = 1);

  struct Outcome {
    wire::Status status = wire::Status::kOk;
    const Manifest* manifest = nullptr;  // if kOk
  };
  // The same digest gives the same manifest. CONFLICT for a part digest known with another size, or
  // a manifest digest known with other parts; LIMIT; BAD_REQUEST for no part, or one that is empty,
  // larger than `most_part_bytes`, or there twice.
  Outcome add(uint32_t tenant, const wire::RegisterRequest& request, uint64_t most_part_bytes);

  // What a life of the node before this one had registered keeps its ids, so that whoever registers
  // it again gets the same. Of a tenant that there is no more (nothing) the ids are only not given
  // away. Ignored where the name has another id already.
  void restore_spec(std::optional<uint32_t> tenant, const Hash& digest, uint32_t id);
  void restore_part(uint32_t spec_id, const Hash& digest, uint64_t bytes, uint32_t id);

  // Null also for another tenant's.
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

  uint32_t most_each_;
  uint32_t last_spec_ = 0, last_part_ = 0;            // ids given away
  std::vector<Manifest> manifests_;                   // id i stands at i - 1
  std::unordered_map<uint32_t, uint32_t> count_of_;   // manifests by tenant
  // Keyed with the tenant where a BlockKey has its spec.
  std::unordered_map<BlockKey, uint32_t, BlockKeyHash> manifest_ids_;
  std::unordered_map<BlockKey, uint32_t, BlockKeyHash> spec_ids_;
  std::unordered_map<BlockKey, KnownPart, BlockKeyHash> parts_;  // keyed with the spec's id
};

}  // namespace kv
