#include "copy_plan.h"

#include <algorithm>

#include "copy_runs.h"

namespace kv {
namespace {

// The loops from `level` on, then one run each.
void copy_loops(const CopyPiece& piece, uint32_t level, uint8_t* to, const uint8_t* from,
                const RunCopy& copy) {
  if (piece.depth == 0) return copy(to, from, piece.run_bytes, 1, 0, 0);
  const CopyLoop& loop = piece.loops[level];
  if (level + 1 == piece.depth)
    return copy(to, from, piece.run_bytes, loop.count, loop.stride[kTo], loop.stride[kFrom]);
  for (uint64_t i = 0; i < loop.count; ++i)
    copy_loops(piece, level + 1, to + i * loop.stride[kTo], from + i * loop.stride[kFrom], copy);
}

}  // namespace

uint64_t CopyPiece::runs() const {
  uint64_t runs = 1;
  for (uint32_t i = 0; i < depth; ++i) runs *= loops[i].count;
  return runs;
}

uint64_t CopyPiece::extent(Side side) const {
  uint64_t bytes = run_bytes;
  for (uint32_t i = 0; i < depth; ++i) bytes += (loops[i].count - 1) * loops[i].stride[side];
  return bytes;
}

size_t CopyPlan::from_count(size_t skipped, size_t count) const {
  return count == 0 ? 0 : ((skipped + count - 1) / to_blocks_ + 1) * from_blocks_;
}

std::string CopyPlan::complaint(const std::vector<SourceBlocks>& from, const Segments& to,
                                size_t skipped, size_t count) const {
  const auto same = [](const std::vector<size_t>& sizes, const std::vector<uint64_t>& planned) {
    return std::equal(sizes.begin(), sizes.end(), planned.begin(), planned.end());
  };
  if (skipped >= to_blocks_) return "more blocks are skipped than a unit has";
  if (count > SIZE_MAX / kMaxBlockRatio - kMaxBlockRatio) return "there are too many blocks";
  if (from.size() != reads_.size()) return "as many sources are needed as were planned for";
  if (!same(to.sizes, to_sizes_)) return "the target's segments are not those planned for";
  for (size_t i = 0; i < from.size(); ++i) {
    if (!reads_[i]) continue;
    if (!same(from[i].segments.sizes, from_sizes_[i]))
      return "a source's segments are not those planned for";
    if (from[i].indices.size() != from_count(skipped, count))
      return "a source needs an index for each block that is read";
  }
  return "";
}

void CopyPlan::run(const std::vector<SourceBlocks>& from, const Segments& to,
                   const std::vector<size_t>& to_indices, size_t skipped) const {
  const RunCopy copy(unit_bytes_ / to_blocks_ * to_indices.size(), least_run_bytes_);
  for (size_t i = 0; i < to_indices.size(); ++i) {
    const size_t unit = (skipped + i) / to_blocks_, block = (skipped + i) % to_blocks_;
    for (size_t k = first_piece_[block]; k < first_piece_[block + 1]; ++k) {
      const CopyPiece& piece = pieces_[k];
      const SourceBlocks& source = from[piece.source];
      const size_t index = source.indices[unit * from_blocks_ + piece.from_block];
      copy_loops(piece, 0, to.at(piece.segment[kTo], to_indices[i]) + piece.at[kTo],
                 source.segments.at(piece.segment[kFrom], index) + piece.at[kFrom], copy);
    }
  }
}

}  // namespace kv
