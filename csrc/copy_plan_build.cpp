// From two shapes to pieces.
#include <algorithm>
#include <numeric>
#include <utility>

#include "copy_plan.h"

namespace kv {
namespace {

struct Rectangle {
  Extent layers, heads;
};

Extent overlap(const Extent& a, const Extent& b) {
  const uint64_t first = std::max(a.first, b.first);
  return {first, std::max(first, std::min(a.end, b.end))};
}

// What is left of `whole` without `taken`, which lies in it.
void subtract(const Rectangle& whole, const Rectangle& taken, std::vector<Rectangle>& left) {
  const auto add = [&](const Extent& layers, const Extent& heads) {
    if (layers.size() != 0 && heads.size() != 0) left.push_back({layers, heads});
  };
  add({whole.layers.first, taken.layers.first}, whole.heads);
  add({taken.layers.end, whole.layers.end}, whole.heads);
  add(taken.layers, {whole.heads.first, taken.heads.first});
  add(taken.layers, {taken.heads.end, whole.heads.end});
}

// A shape with its strides, and where the segments of a block begin (the last one: its end).
struct Laid {
  PartShape shape;
  PartStrides strides;
  std::vector<uint64_t> starts;

  size_t segment_of(uint64_t at) const {
    return static_cast<size_t>(std::upper_bound(starts.begin(), starts.end(), at) -
                               starts.begin()) - 1;
  }
};

// Runs that adjoin on both sides become one, and loops that continue each other one loop.
void join(CopyPiece& piece) {
  const auto begin = piece.loops.begin();
  const auto drop = [&](size_t at) {
    std::copy(begin + at + 1, begin + piece.depth, begin + at);
    --piece.depth;
  };
  for (bool again = true; again;) {
    again = false;
    for (size_t i = 0; i < piece.depth && !again; ++i) {
      const CopyLoop& loop = piece.loops[i];
      if (loop.stride[kFrom] != piece.run_bytes || loop.stride[kTo] != piece.run_bytes) continue;
      piece.run_bytes *= loop.count;
      drop(i);
      again = true;
    }
  }
  for (size_t i = 0; i < piece.depth; ++i)
    for (size_t k = 0; k < piece.depth; ++k) {
      const CopyLoop& outer = piece.loops[i];
      CopyLoop& inner = piece.loops[k];
      if (i == k || outer.stride[kFrom] != inner.count * inner.stride[kFrom] ||
          outer.stride[kTo] != inner.count * inner.stride[kTo])
        continue;
      inner.count *= outer.count;
      drop(i);
      return join(piece);
    }
}

}  // namespace

class PlanBuilder {
 public:
  explicit PlanBuilder(std::string& why) : why_(why) {}

  std::optional<CopyPlan> run(const std::vector<PartShape>& sources, const PartShape& target) {
    if (!lay(target, to_)) return std::nullopt;
    missing_ = {{target.layers, target.heads}};
    if (sources.size() > kMaxSources && !refuse(kTooMany)) return std::nullopt;
    for (size_t i = 0; i < sources.size(); ++i)
      if (!add_source(sources[i], i)) return std::nullopt;
    if (!missing_.empty() && !refuse(told_missing())) return std::nullopt;
    if (!finish()) return std::nullopt;
    return std::move(plan_);
  }

 private:
  bool refuse(std::string reason) {
    why_ = std::move(reason);
    return false;
  }

  bool lay(const PartShape& shape, Laid& laid) {
    const std::optional<PartStrides> strides = strides_of(shape, why_);
    if (!strides) return false;
    laid = {shape, *strides, {0}};
    if (shape.segments.empty()) laid.shape.segments = {strides->block_bytes};
    for (const uint64_t size : laid.shape.segments) laid.starts.push_back(laid.starts.back() + size);
    return true;
  }

  // Reads from this source what no earlier one has.
  bool add_source(const PartShape& shape, size_t number) {
    if (!lay(shape, from_) || !units()) return false;
    plan_.from_sizes_.push_back(from_.shape.segments);
    plan_.reads_.push_back(false);
    std::vector<Rectangle> left;
    for (const Rectangle& wanted : missing_) {
      const Rectangle both{overlap(wanted.layers, shape.layers), overlap(wanted.heads, shape.heads)};
      if (both.layers.size() == 0 || both.heads.size() == 0) {
        left.push_back(wanted);
        continue;
      }
      subtract(wanted, both, left);
      plan_.reads_.back() = true;
      if (!add_rectangle(both, static_cast<uint32_t>(number))) return false;
    }
    missing_ = std::move(left);
    return missing_.size() <= kMaxSources || refuse(kTooMany);
  }

  // How many blocks of each side have the same tokens; the same for all sources.
  bool units() {
    const uint64_t from = from_.shape.tokens, to = to_.shape.tokens;
    if (from % to != 0 && to % from != 0)
      return refuse("blocks of " + std::to_string(from) + " tokens and of " + std::to_string(to) +
                    ": neither is a multiple of the other");
    const uint64_t from_blocks = to > from ? to / from : 1, to_blocks = from > to ? from / to : 1;
    if (std::max(from_blocks, to_blocks) > kMaxBlockRatio) return refuse(kTooMany);
    if (!plan_.reads_.empty() &&
        (from_blocks != plan_.from_blocks_ || to_blocks != plan_.to_blocks_))
      return refuse("the stored parts have blocks of different sizes");
    plan_.from_blocks_ = from_blocks;
    plan_.to_blocks_ = to_blocks;
    const bool same = from_.shape.element_bytes == to_.shape.element_bytes &&
                      from_.shape.elements == to_.shape.elements;
    return same || refuse("the heads or their elements differ in size");
  }

  bool add_rectangle(const Rectangle& both, uint32_t source) {
    const auto& elements = to_.shape.elements;
    // Where values lie behind the keys of their token and head on both sides, they are one plane.
    const bool one = elements[1] != 0 && adjoin(from_) && adjoin(to_);
    const bool looped = !one && elements[0] == elements[1];
    const size_t planes = one || looped || elements[1] == 0 ? 1 : 2;
    for (uint32_t i = 0; i < std::max(plan_.from_blocks_, plan_.to_blocks_); ++i)
      for (size_t plane = 0; plane < planes; ++plane) {
        const uint64_t count = elements[plane] + (one ? elements[1] : 0);
        const std::array<uint64_t, kAxes> counts{
            both.layers.size(), looped ? 2u : 1u, both.heads.size(),
            std::min(from_.shape.tokens, to_.shape.tokens), count};
        if (!add_piece(both, source, i, plane, counts)) return false;
      }
    return true;
  }

  static bool adjoin(const Laid& side) {
    return side.strides.plane[1] == side.shape.elements[0] * side.shape.element_bytes &&
           side.strides.step[0][kElement] == side.shape.element_bytes;
  }

  // The tokens that the i-th block of the side with smaller blocks has, from `plane` on.
  bool add_piece(const Rectangle& both, uint32_t source, uint32_t i, size_t plane,
                 const std::array<uint64_t, kAxes>& counts) {
    CopyPiece piece{};
    piece.source = source;
    piece.from_block = plan_.from_blocks_ > 1 ? i : 0;
    piece.to_block = plan_.to_blocks_ > 1 ? i : 0;
    piece.run_bytes = to_.shape.element_bytes;
    std::array<std::array<uint64_t, kAxes>, 2> steps;
    for (const Side side : {kFrom, kTo}) {
      const Laid& laid = side == kFrom ? from_ : to_;
      auto& step = steps[side] = laid.strides.step[plane];
      step[kPlane] = laid.strides.plane[1];
      const bool larger = (side == kFrom ? plan_.to_blocks_ : plan_.from_blocks_) > 1;
      piece.at[side] = laid.strides.plane[plane] +
                       (both.layers.first - laid.shape.layers.first) * step[kLayer] +
                       (both.heads.first - laid.shape.heads.first) * step[kHead] +
                       (larger ? i * counts[kToken] * step[kToken] : 0);
    }
    for (size_t axis = 0; axis < kAxes; ++axis)
      if (counts[axis] > 1)
        piece.loops[piece.depth++] = {counts[axis], {steps[kFrom][axis], steps[kTo][axis]}};
    join(piece);
    // The target is written from its beginning to its end, as far as that goes.
    for (size_t i = 1; i < piece.depth; ++i)
      for (size_t k = i; k > 0 && piece.loops[k].stride[kTo] > piece.loops[k - 1].stride[kTo]; --k)
        std::swap(piece.loops[k], piece.loops[k - 1]);
    return cut(piece, kFrom);
  }

  // Cuts the piece so that each lies within one segment, of this side and then of the other.
  bool cut(const CopyPiece& piece, Side side) {
    if (++steps_ > 4 * kMaxPieces) return refuse(kTooMany);
    const Laid& laid = side == kFrom ? from_ : to_;
    const size_t segment = laid.segment_of(piece.at[side]);
    if (piece.at[side] + piece.extent(side) <= laid.starts[segment + 1])
      return settle(piece, side, segment);
    return piece.depth == 0 ? cut_run(piece, side) : cut_loop(piece, side);
  }

  bool settle(CopyPiece piece, Side side, size_t segment) {
    const Laid& laid = side == kFrom ? from_ : to_;
    piece.segment[side] = static_cast<uint32_t>(segment);
    piece.at[side] -= laid.starts[segment];
    if (side == kFrom) return cut(piece, kTo);
    if (plan_.pieces_.size() == kMaxPieces) return refuse(kTooMany);
    plan_.pieces_.push_back(piece);
    return true;
  }

  bool cut_run(CopyPiece rest, Side side) {
    const Laid& laid = side == kFrom ? from_ : to_;
    while (rest.run_bytes != 0) {
      const size_t segment = laid.segment_of(rest.at[side]);
      const uint64_t bytes = std::min(rest.run_bytes, laid.starts[segment + 1] - rest.at[side]);
      CopyPiece head = rest;
      head.run_bytes = bytes;
      if (!settle(head, side, segment)) return false;
      rest.run_bytes -= bytes;
      for (const Side each : {kFrom, kTo}) rest.at[each] += bytes;
    }
    return true;
  }

  bool cut_loop(const CopyPiece& piece, Side side) {
    const auto begin = piece.loops.begin();
    const auto widest =
        std::max_element(begin, begin + piece.depth, [side](const CopyLoop& a, const CopyLoop& b) {
          return a.stride[side] < b.stride[side];
        });
    const CopyLoop loop = *widest;
    const auto place = static_cast<size_t>(widest - begin);
    CopyPiece inner = piece;
    std::copy(widest + 1, begin + piece.depth, inner.loops.begin() + place);
    --inner.depth;
    const uint64_t extent = inner.extent(side);
    const Laid& laid = side == kFrom ? from_ : to_;
    for (uint64_t i = 0; i < loop.count;) {
      CopyPiece some = inner;
      for (const Side each : {kFrom, kTo}) some.at[each] += i * loop.stride[each];
      const size_t segment = laid.segment_of(some.at[side]);
      const uint64_t room = laid.starts[segment + 1] - some.at[side];
      const uint64_t fit = room < extent ? 0 : (room - extent) / loop.stride[side] + 1;
      const uint64_t taken = std::min(fit, loop.count - i);
      if (taken > 1) {
        std::copy_backward(some.loops.begin() + place, some.loops.begin() + some.depth,
                           some.loops.begin() + some.depth + 1);
        some.loops[place] = {taken, loop.stride};
        ++some.depth;
      }
      if (!(taken == 0 ? cut(some, side) : settle(some, side, segment))) return false;
      i += std::max<uint64_t>(taken, 1);
    }
    return true;
  }

  bool finish() {
    auto& pieces = plan_.pieces_;
    std::stable_sort(pieces.begin(), pieces.end(),
                     [](const CopyPiece& a, const CopyPiece& b) { return a.to_block < b.to_block; });
    plan_.first_piece_.assign(plan_.to_blocks_ + 1, 0);
    plan_.to_sizes_ = to_.shape.segments;
    plan_.least_run_bytes_ = kMaxBlockBytes;
    for (const CopyPiece& piece : pieces) {
      // Running trusts these numbers with the caller's memory, so they are looked at once more.
      for (const Side side : {kFrom, kTo}) {
        const auto& sizes = side == kFrom ? plan_.from_sizes_[piece.source] : plan_.to_sizes_;
        if (piece.at[side] + piece.extent(side) > sizes[piece.segment[side]])
          return refuse("a piece lies outside its segment");
      }
      ++plan_.first_piece_[piece.to_block + 1];
      plan_.runs_ += piece.runs();
      plan_.unit_bytes_ += piece.runs() * piece.run_bytes;
      plan_.least_run_bytes_ = std::min(plan_.least_run_bytes_, piece.run_bytes);
    }
    std::partial_sum(plan_.first_piece_.begin(), plan_.first_piece_.end(),
                     plan_.first_piece_.begin());
    return true;
  }

  std::string told_missing() const {
    const auto told = [](const Extent& range) {
      return std::to_string(range.first) + ".." + std::to_string(range.end);
    };
    return "no stored part has layers " + told(missing_.front().layers) + " of KV heads " +
           told(missing_.front().heads);
  }

  static constexpr const char* kTooMany = "the copy would take too many pieces";
  std::string& why_;
  Laid from_, to_;
  std::vector<Rectangle> missing_;
  CopyPlan plan_;
  size_t steps_ = 0;
};

std::optional<CopyPlan> CopyPlan::build(const std::vector<PartShape>& sources,
                                        const PartShape& target, std::string& why) {
  return PlanBuilder(why).run(sources, target);
}

}  // namespace kv
