// Where blocks are in a caller's memory, and copies between there and a pool.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace kv {

// Block i is the concatenation over k of sizes[k] bytes at bases[k] + i * strides[k].
struct Segments {
  std::vector<uintptr_t> bases;
  std::vector<int64_t> strides;
  std::vector<size_t> sizes;
  std::optional<size_t> blocks;  // if known, indices are checked against it
  bool writable = true;
  size_t block_bytes = 0;  // sum of sizes

  uint8_t* at(size_t k, size_t block) const {
    return reinterpret_cast<uint8_t*>(
        bases[k] + static_cast<uintptr_t>(strides[k] * static_cast<int64_t>(block)));
  }
};

struct Piece {
  uintptr_t address = 0;
  size_t bytes = 0;
};
// Where the bytes of a block are, in order, in as few runs as possible.
std::vector<Piece> pieces_of(const Segments& segments, size_t block);

// The CRC32C of each block, without a copy.
std::vector<uint32_t> digest(const Segments& segments, const std::vector<size_t>& indices);

// Copies a block into a slot, or out of it. Returns the CRC32C of the copy; 0 without `digest`.
uint32_t copy_in(uint8_t* slot, const Segments& segments, size_t block, bool digest);
uint32_t copy_out(const uint8_t* slot, const Segments& segments, size_t block, bool digest);

}  // namespace kv
