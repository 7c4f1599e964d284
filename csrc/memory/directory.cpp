#include "memory/directory.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace kv {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;

uint64_t pack(uint32_t spec_id, uint32_t part_id) { return (uint64_t{spec_id} << 32) | part_id; }

}  // namespace

DirectoryWindow::DirectoryWindow(size_t entries, const PartKey& key)
    : names_(pack(key.block.spec_id, key.part_id)), mask_(entries - 1) {
  std::memcpy(hash_, key.block.hash.bytes, sizeof hash_);
  // The hash is uniform; the multiplication spreads the parts of a block.
  first_ = ((hash_[0] ^ (names_ * 0x9E3779B97F4A7C15u)) >> 7) & mask_;
}

bool DirectoryWindow::names(const DirectoryEntry& entry) const {
  if (entry.names.load(kRelaxed) != names_) return false;
  for (size_t i = 0; i < 4; ++i)
    if (entry.hash[i].load(kRelaxed) != hash_[i]) return false;
  return true;
}

void DirectoryWindow::write(DirectoryEntry& entry, uint64_t offset, uint32_t crc) const {
  for (size_t i = 0; i < 4; ++i) entry.hash[i].store(hash_[i], kRelaxed);
  entry.names.store(names_, kRelaxed);
  entry.offset.store(offset, kRelaxed);
  entry.crc.store(crc, kRelaxed);
}

size_t directory_bytes(uint64_t pool_bytes) {
  constexpr uint64_t kShare = 512, kSmallShare = 128, kSmallMost = 64 << 20, kLeast = 4096;
  const uint64_t small = std::bit_ceil(std::min(pool_bytes / kSmallShare, kSmallMost));
  return std::max({std::bit_floor(pool_bytes / kShare), small, kLeast});
}

void Directory::publish(const PartKey& key, uint64_t offset, uint32_t crc) {
  const DirectoryWindow window(count_, key);
  for (size_t i = 0; i < DirectoryWindow::kWindow; ++i) {
    DirectoryEntry& entry = entries_[window[i]];
    if (entry.names.load(kRelaxed) != 0) continue;
    const uint64_t version = entry.version.load(kRelaxed);
    entry.version.store(version + 1, kRelaxed);
    std::atomic_thread_fence(std::memory_order_release);
    window.write(entry, offset, crc);
    entry.version.store(version + 2, std::memory_order_release);
    return;
  }
}

void Directory::withdraw(const PartKey& key) {
  const DirectoryWindow window(count_, key);
  for (size_t i = 0; i < DirectoryWindow::kWindow; ++i) {
    DirectoryEntry& entry = entries_[window[i]];
    if (!window.names(entry)) continue;
    const uint64_t version = entry.version.load(kRelaxed);
    entry.version.store(version + 1, kRelaxed);
    std::atomic_thread_fence(std::memory_order_release);
    entry.names.store(0, kRelaxed);
    // Before the slot is written again: a reader that sees a new byte sees this too.
    entry.version.store(version + 2, std::memory_order_seq_cst);
    return;
  }
}

std::optional<PartKey> Directory::at(uint64_t index) const {
  if (index >= count_) return std::nullopt;
  const DirectoryEntry& entry = entries_[index];
  const uint64_t names = entry.names.load(kRelaxed);
  if (names == 0) return std::nullopt;
  PartKey key;
  key.block.spec_id = static_cast<uint32_t>(names >> 32);
  key.part_id = static_cast<uint32_t>(names);
  for (size_t i = 0; i < 4; ++i) {
    const uint64_t word = entry.hash[i].load(kRelaxed);
    std::memcpy(key.block.hash.bytes + 8 * i, &word, sizeof word);
  }
  return key;
}

std::optional<DirectoryView::Place> DirectoryView::find(const PartKey& key) const {
  const DirectoryWindow window(count_, key);
  for (size_t i = 0; i < DirectoryWindow::kWindow; ++i) {
    const DirectoryEntry& entry = entries_[window[i]];
    Place place{window[i], entry.version.load(std::memory_order_acquire), 0, 0};
    if ((place.version & 1) != 0 || !window.names(entry)) continue;
    place.offset = entry.offset.load(kRelaxed);
    place.crc = static_cast<uint32_t>(entry.crc.load(kRelaxed));
    if (stands(place)) return place;
  }
  return std::nullopt;
}

bool DirectoryView::stands(const Place& place) const {
  std::atomic_thread_fence(std::memory_order_acquire);
  return entries_[place.index].version.load(kRelaxed) == place.version;
}

void DirectoryView::prefetch(const PartKey& key) const {
  __builtin_prefetch(&entries_[DirectoryWindow(count_, key)[0]]);
}

}  // namespace kv
