// The small numbers of specs and parts in a journal of the SSD tier.
#pragma once

#include <unordered_map>

#include "disk/journal/records.h"

namespace kv {

// Invariants: a number is that of one spec or part and never of another; a spec or part has one
// number; the spec of a part has one.
class DiskNames {
 public:
  static constexpr uint32_t kMaxSpecs = 65536;
  static constexpr uint32_t kMaxParts = 1u << 20;

  // Adds a definition of a journal. False if that breaks an invariant or a limit.
  bool add(const DiskSpec& spec);
  bool add(const DiskPart& part);
  // The number of a spec or part, assigned at the first call. 0 at the limit.
  uint32_t spec_number(std::string_view tenant, const wire::Hash& digest);
  uint32_t part_number(uint32_t spec, const wire::Hash& digest, uint64_t bytes);

  // Null for an unknown number.
  const DiskSpec* spec(uint32_t number) const;
  const DiskPart* part(uint32_t number) const;
  const std::map<uint32_t, DiskSpec>& specs() const { return specs_; }
  const std::map<uint32_t, DiskPart>& parts() const { return parts_; }

 private:
  std::map<uint32_t, DiskSpec> specs_;
  std::map<uint32_t, DiskPart> parts_;
  std::map<std::string, uint32_t, std::less<>> spec_numbers_;
  std::map<std::string, uint32_t, std::less<>> part_numbers_;
};

}  // namespace kv
