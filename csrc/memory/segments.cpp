#include "memory/segments.h"

#include <cstring>

#include "digest/crc32c.h"

namespace kv {
namespace {

uint32_t copy(uint8_t* to, const uint8_t* from, size_t size, bool digest, uint32_t crc) {
  if (digest) return copy_crc32c(to, from, size, crc);
  if (size != 0) std::memcpy(to, from, size);
  return 0;
}

}  // namespace

std::vector<Piece> pieces_of(const Segments& segments, size_t block) {
  std::vector<Piece> pieces;
  for (size_t k = 0; k < segments.sizes.size(); ++k) {
    const auto at = reinterpret_cast<uintptr_t>(segments.at(k, block));
    if (segments.sizes[k] == 0) continue;
    if (!pieces.empty() && pieces.back().address + pieces.back().bytes == at)
      pieces.back().bytes += segments.sizes[k];
    else pieces.push_back({at, segments.sizes[k]});
  }
  return pieces;
}

std::vector<uint32_t> digest(const Segments& segments, const std::vector<size_t>& indices) {
  std::vector<uint32_t> crcs;
  for (const size_t index : indices) {
    uint32_t& crc = crcs.emplace_back(0);
    for (size_t k = 0; k < segments.sizes.size(); ++k)
      crc = crc32c(segments.at(k, index), segments.sizes[k], crc);
  }
  return crcs;
}

uint32_t copy_in(uint8_t* slot, const Segments& segments, size_t block, bool digest) {
  uint32_t crc = 0;
  for (size_t k = 0; k < segments.sizes.size(); slot += segments.sizes[k], ++k)
    crc = copy(slot, segments.at(k, block), segments.sizes[k], digest, crc);
  return crc;
}

uint32_t copy_out(const uint8_t* slot, const Segments& segments, size_t block, bool digest) {
  uint32_t crc = 0;
  for (size_t k = 0; k < segments.sizes.size(); slot += segments.sizes[k], ++k)
    crc = copy(segments.at(k, block), slot, segments.sizes[k], digest, crc);
  return crc;
}

}  // namespace kv
