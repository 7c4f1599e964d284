#include "segments.h"

#include <cstring>

#include "crc32c.h"

namespace kv {

std::vector<Piece> pieces_of(const Segments& segments, size_t block) {
  std::vector<Piece> pieces;
  for (size_t k = 0; k < segments.sizes.size(); ++k) {
    const auto at = reinterpret_cast<uintptr_t>(segments.at(k, block));
    if (segments.sizes[k] == 0) continue;
    if (!pieces.empty() && pieces.back().address + pieces.back().bytes == at)
      pieces.back().bytes += segments.sizes[k];
    else
      pieces.push_back({at, segments.sizes[k]});
  }
  return pieces;
}

void digest(const Segments& segments, const std::vector<size_t>& indices,
            std::vector<uint32_t>& crcs) {
  crcs.resize(indices.size());
  for (size_t i = 0; i < indices.size(); ++i) {
    uint32_t crc = 0;
    for (size_t k = 0; k < segments.sizes.size(); ++k)
      crc = crc32c(segments.at(k, indices[i]), segments.sizes[k], crc);
    crcs[i] = crc;
  }
}

void gather(uint8_t* pool, const Segments& segments, const std::vector<size_t>& indices,
            const std::vector<uint64_t>& offsets, std::vector<uint32_t>& crcs) {
  crcs.resize(indices.size());
  for (size_t i = 0; i < indices.size(); ++i) {
    uint8_t* to = pool + offsets[i];
    uint32_t crc = 0;
    for (size_t k = 0; k < segments.sizes.size(); to += segments.sizes[k], ++k)
      crc = copy_crc32c(to, segments.at(k, indices[i]), segments.sizes[k], crc);
    crcs[i] = crc;
  }
}

void scatter(const uint8_t* pool, const Segments& segments, const std::vector<size_t>& indices,
             const std::vector<uint64_t>& offsets, bool digest, std::vector<uint32_t>& crcs) {
  if (digest) crcs.resize(indices.size());
  for (size_t i = 0; i < indices.size(); ++i) {
    const uint8_t* from = pool + offsets[i];
    uint32_t crc = 0;
    for (size_t k = 0; k < segments.sizes.size(); from += segments.sizes[k], ++k) {
      uint8_t* const to = segments.at(k, indices[i]);
      if (digest) crc = copy_crc32c(to, from, segments.sizes[k], crc);
      else if (segments.sizes[k] != 0) std::memcpy(to, from, segments.sizes[k]);
    }
    if (digest) crcs[i] = crc;
  }
}

}  // namespace kv
