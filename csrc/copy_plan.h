// Copies between parts of different shape: planned once, then run over many blocks.
//
// A plan is a list of pieces, each a nest of strided loops around one run of bytes. The builder joins
// what adjoins on both sides, cuts pieces where the caller's memory does, and refuses what would take
// too many; running it looks nothing up and decides nothing.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "part_shape.h"
#include "segments.h"

namespace kv {

inline constexpr size_t kMaxSources = 4096;
inline constexpr uint64_t kMaxBlockRatio = 4096;
inline constexpr size_t kMaxPieces = size_t{1} << 16;

// The two sides of a copy, as an index.
enum Side : uint8_t { kFrom, kTo };

struct CopyLoop {
  uint64_t count;
  std::array<uint64_t, 2> stride;  // by Side
};

struct CopyPiece {
  uint32_t source;               // which of the sources
  uint32_t from_block, to_block;  // which blocks of a unit
  std::array<uint32_t, 2> segment;
  std::array<uint64_t, 2> at;    // offset in the segment
  uint64_t run_bytes;
  std::array<CopyLoop, kAxes> loops;  // outermost first
  uint32_t depth;

  uint64_t runs() const;
  // From the first byte to behind the last one.
  uint64_t extent(Side side) const;
};

// Where the blocks of one source lie, and which of them are meant.
struct SourceBlocks {
  const Segments& segments;
  const std::vector<size_t>& indices;
};

class CopyPlan {
 public:
  // A plan that fills the target from sources that have its layers and KV heads between them; where
  // several have the same, the first is read. One of the block sizes must be a multiple of the
  // other. Nothing, and the reason in `why`, where that cannot be.
  static std::optional<CopyPlan> build(const std::vector<PartShape>& sources,
                                       const PartShape& target, std::string& why);

  // A unit is the fewest whole blocks of both sides that have the same tokens.
  size_t from_blocks() const { return from_blocks_; }
  size_t to_blocks() const { return to_blocks_; }
  const std::vector<CopyPiece>& pieces() const { return pieces_; }
  uint64_t unit_bytes() const { return unit_bytes_; }
  // Runs of one unit, and the bytes of the shortest.
  uint64_t runs() const { return runs_; }
  uint64_t least_run_bytes() const { return least_run_bytes_; }
  const std::vector<bool>& reads() const { return reads_; }  // by source

  // How many indices a source must have for `count` blocks of the target, of which the first is
  // the one after `skipped` blocks of its unit.
  size_t from_count(size_t skipped, size_t count) const;
  // "" if run() may be called so: the segments are of the sizes that were planned for, and there
  // are as many indices as it will read.
  std::string complaint(const std::vector<SourceBlocks>& from, const Segments& to, size_t skipped,
                        size_t count) const;
  // Copies the blocks `to_indices` of the target. Memory of the two sides must not overlap. The
  // caller has heard no complaint and checked the indices against the segments.
  void run(const std::vector<SourceBlocks>& from, const Segments& to,
           const std::vector<size_t>& to_indices, size_t skipped) const;

 private:
  friend class PlanBuilder;
  size_t from_blocks_ = 1, to_blocks_ = 1;
  std::vector<CopyPiece> pieces_;     // by block of the target
  std::vector<size_t> first_piece_;   // of each block of the target in a unit, and the end
  std::vector<bool> reads_;
  std::vector<std::vector<uint64_t>> from_sizes_;  // of segments, by source
  std::vector<uint64_t> to_sizes_;
  uint64_t unit_bytes_ = 0, runs_ = 0, least_run_bytes_ = 0;
};

}  // namespace kv
