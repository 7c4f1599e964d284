#include "part_shape.h"

#include <algorithm>
#include <string_view>

namespace kv {
namespace {

constexpr std::string_view kLetters = "LKHTE";

// The axes of `order`, outermost first; false if a letter means none, or comes twice.
bool read_order(const std::string& order, std::vector<Axis>& axes) {
  for (const char letter : order) {
    const size_t axis = kLetters.find(letter);
    if (axis == std::string_view::npos || order.find(letter) != order.rfind(letter)) return false;
    axes.push_back(static_cast<Axis>(axis));
  }
  return true;
}

bool multiply(uint64_t& bytes, uint64_t count) {
  return !__builtin_mul_overflow(bytes, count, &bytes) && bytes <= kMaxBlockBytes;
}

class Measure {
 public:
  Measure(const PartShape& shape, std::string& why) : shape_(shape), why_(why) {}

  std::optional<PartStrides> run() {
    std::vector<Axis> axes;
    if (!sensible() || !ordered(axes)) return std::nullopt;
    std::array<uint64_t, 2> bytes{shape_.element_bytes, shape_.element_bytes};
    for (size_t at = axes.size(); at-- > 0;)
      if (!add(axes[at], at == 0, bytes)) return std::nullopt;
    strides_.block_bytes = bytes[0];
    if (!within_segments()) return std::nullopt;
    return strides_;
  }

 private:
  uint64_t count(Axis axis, size_t plane) const {
    if (axis == kLayer) return shape_.layers.size();
    if (axis == kHead) return shape_.heads.size();
    if (axis == kToken) return shape_.tokens;
    return axis == kElement ? shape_.elements[plane] : two_planes() ? 2 : 1;
  }
  bool two_planes() const { return shape_.elements[1] != 0; }
  bool refuse(const char* reason) {
    why_ = reason;
    return false;
  }

  bool sensible() {
    for (const Extent& range : {shape_.layers, shape_.heads})
      if (range.first >= range.end) return refuse("a range of layers or KV heads is empty");
    if (shape_.tokens == 0 || shape_.elements[0] == 0 || shape_.element_bytes == 0)
      return refuse("tokens, elements and the bytes of an element must be at least 1");
    return true;
  }

  bool ordered(std::vector<Axis>& axes) {
    if (!read_order(shape_.order, axes))
      return refuse("the order must be made of L, K, H, T and E, each at most once");
    for (size_t axis = 0; axis < kAxes; ++axis)
      if (std::find(axes.begin(), axes.end(), axis) == axes.end() &&
          count(static_cast<Axis>(axis), 0) != 1)
        return refuse("the order leaves out an axis that has more than one");
    if (shape_.page_bytes != 0 && (axes.empty() || axes.front() != kLayer))
      return refuse("pages are of layers: the order must begin with L");
    return true;
  }

  // Takes one axis more, from the inside out. Until the planes are joined each has its own bytes.
  bool add(Axis axis, bool outermost, std::array<uint64_t, 2>& bytes) {
    if (axis == kPlane) {
      strides_.plane[1] = two_planes() ? bytes[0] : 0;
      joined_ = true;
      if (two_planes()) bytes[0] += bytes[1];
      bytes[1] = bytes[0];
      return bytes[0] <= kMaxBlockBytes || refuse("a block has too many bytes");
    }
    if (axis == kElement && joined_ && two_planes() && shape_.elements[0] != shape_.elements[1])
      return refuse("keys and values of different size cannot alternate by element");
    if (outermost && shape_.page_bytes != 0 && !pad(bytes)) return false;
    for (size_t plane = 0; plane < 2; ++plane) {
      strides_.step[plane][axis] = bytes[plane];
      if (plane == 1 && !two_planes()) continue;
      if (!multiply(bytes[plane], count(axis, plane))) return refuse("a block has too many bytes");
    }
    if (!two_planes()) bytes[1] = bytes[0];
    return true;
  }

  bool pad(std::array<uint64_t, 2>& bytes) {
    if (shape_.page_bytes < bytes[0]) return refuse("a page is smaller than what a layer holds");
    bytes.fill(shape_.page_bytes);
    return true;
  }

  bool within_segments() {
    if (shape_.segments.empty()) return true;
    if (shape_.segments.size() > kMaxSegments) return refuse("a block lies in too many segments");
    uint64_t bytes = 0;
    for (const uint64_t size : shape_.segments)
      if (size > kMaxBlockBytes || (bytes += size) > kMaxBlockBytes)
        return refuse("the segments have too many bytes");
    return bytes == strides_.block_bytes ||
           refuse("the segments have other bytes than a block");
  }

  const PartShape& shape_;
  std::string& why_;
  PartStrides strides_;
  bool joined_ = false;
};

}  // namespace

std::optional<PartStrides> strides_of(const PartShape& shape, std::string& why) {
  return Measure(shape, why).run();
}

}  // namespace kv
