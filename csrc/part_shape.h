// How the bytes of a part of one block are ordered, in numbers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace kv {

// The axes of a part. kPlane counts keys and values apart: two planes, or one.
enum Axis : uint8_t { kLayer, kPlane, kHead, kToken, kElement };
inline constexpr size_t kAxes = 5;

// A half-open range.
struct Extent {
  uint64_t first, end;
  uint64_t size() const { return end - first; }
};

struct PartShape {
  Extent layers, heads;
  uint64_t tokens = 1;  // of one block
  // Of one token and head: of the plane of keys, and of that of values (0: there is but one plane).
  std::array<uint64_t, 2> elements{1, 0};
  uint64_t element_bytes = 1;
  // Outermost first, a letter each: L layers, K planes, H heads, T tokens, E elements. What is left
  // out has but one of its kind.
  std::string order;
  uint64_t page_bytes = 0;  // of a layer, with the padding behind it; 0: as much as it holds
  // Sizes of the pieces of memory that a block's bytes lie in, in order. Empty: they lie in one.
  std::vector<uint64_t> segments;
};

// Bytes from one to the next along an axis, for each plane, and where the planes begin.
struct PartStrides {
  std::array<std::array<uint64_t, kAxes>, 2> step{};
  std::array<uint64_t, 2> plane{};
  uint64_t block_bytes = 0;
};

// No block has more bytes than this, so that offsets within one never overflow.
inline constexpr uint64_t kMaxBlockBytes = uint64_t{1} << 40;
inline constexpr size_t kMaxSegments = size_t{1} << 16;

// Nothing, and the reason in `why`, where the numbers make no sense together.
std::optional<PartStrides> strides_of(const PartShape& shape, std::string& why);

}  // namespace kv
