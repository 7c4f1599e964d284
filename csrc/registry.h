// What engines have registered: specs, parts and manifests, and the small ids that stand for them.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "table.h"
#include "wire.h"

namespace kv {

struct ManifestPart {
  uint32_t part_id = 0;
  uint64_t bytes = 0;
};

struct Manifest {
  uint32_t id = 0;
  uint32_t spec_id = 0;
  Hash digest{};
  std::string doc;
  std::vector<ManifestPart> parts;  // in the manifest's order
  PartIds part_ids;                 // ascending
};

// Ids live as long as the server; what is registered stays. Bounded by kMaxManifests.
class Registry {
 public:
  static constexpr uint32_t kMaxManifests = 1024;

  struct Outcome {
    wire::Status status = wire::Status::kOk;
    const Manifest* manifest = nullptr;  // if kOk
  };
  // The same digest gives the same manifest. CONFLICT for a part digest known with another size, or
  // a manifest digest known with other parts; LIMIT; BAD_REQUEST for no part, or one that is empty,
  // larger than `most_part_bytes`, or there twice.
  Outcome add(const wire::RegisterRequest& request, uint64_t most_part_bytes);

  const Manifest* find(uint32_t id) const;
  const std::vector<Manifest>& manifests() const { return manifests_; }

 private:
  struct KnownPart {
    uint32_t id = 0;
    uint64_t bytes = 0;
  };
  wire::Status check(const wire::RegisterRequest& request, uint64_t most_part_bytes) const;
  bool agrees(const Manifest& known, const wire::RegisterRequest& request) const;

  std::vector<Manifest> manifests_;                                    // id i stands at i - 1
  std::unordered_map<BlockKey, uint32_t, BlockKeyHash> manifest_ids_;  // keyed with spec_id 0
  std::unordered_map<BlockKey, uint32_t, BlockKeyHash> spec_ids_;      // the same
  std::unordered_map<BlockKey, KnownPart, BlockKeyHash> parts_;        // keyed with the spec's id
};

}  // namespace kv
