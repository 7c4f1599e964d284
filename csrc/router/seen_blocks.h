// Which blocks requests have asked for so far: a sketch of their hashes, in bounded memory.
//
// Two split block Bloom filters (Putze, Sanders, Singler, "Cache-, hash- and space-efficient Bloom
// filters", 2007), each of lines of 512 bits with one bit in each word. A full one takes the place
// of the older one, which is emptied: what was asked for is known for one to two fillings.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

namespace kv {

class SeenBlocks {
 public:
  // Both filters together take at most `bytes`.
  explicit SeenBlocks(size_t bytes)
      : lines_(bytes / 2 / sizeof(Line)), horizon_(lines_ * sizeof(Line) * 8 / kBitsPerBlock) {
    if (lines_ == 0 || lines_ >> 32 != 0) throw std::bad_alloc();
    new_ = map();
    old_ = map();
  }
  ~SeenBlocks() {
    munmap(new_, lines_ * sizeof(Line));
    munmap(old_, lines_ * sizeof(Line));
  }
  SeenBlocks(const SeenBlocks&) = delete;
  SeenBlocks& operator=(const SeenBlocks&) = delete;

  // How many leading blocks of a chain were seen before; all of them are from now on. Chains with
  // another `seed` are others.
  size_t see(const std::vector<uint64_t>& chain, uint64_t seed) {
    size_t run = 0;
    for (size_t i = 0; i < chain.size(); ++i) {
      if (i + kAhead < chain.size()) __builtin_prefetch(new_ + at(mixed(chain[i + kAhead], seed)));
      const uint64_t hash = mixed(chain[i], seed);
      bool seen = !add(new_[at(hash)], hash);
      held_ += !seen;
      if (!seen) seen = has(old_[at(hash)], hash);
      if (seen && run == i) ++run;
    }
    if (held_ >= horizon_) turn();
    if (held_ >= kWarm && !std::exchange(huge_, true)) {  // random lookups miss the TLB
      for (Line* each : {new_, old_}) madvise(each, lines_ * sizeof(Line), MADV_HUGEPAGE);
    }
    return run;
  }

  size_t bytes() const { return 2 * lines_ * sizeof(Line); }
  size_t blocks() const { return held_ + before_; }
  size_t horizon() const { return horizon_; }  // blocks that are known at least

 private:
  struct alignas(64) Line {
    uint64_t words[8];
  };
  static constexpr size_t kBitsPerBlock = 16;
  static constexpr size_t kAhead = 8;
  static constexpr size_t kWarm = 1 << 16;  // before, huge pages are mostly empty, and dear to clear

  static uint64_t mixed(uint64_t id, uint64_t seed) {
    uint64_t hash = (id ^ seed) * 0x9e3779b97f4a7c15ull;
    hash = (hash ^ hash >> 32) * 0xd6e8feb86659fd93ull;
    return hash ^ hash >> 32;
  }
  size_t at(uint64_t hash) const { return static_cast<size_t>((hash >> 32) * lines_ >> 32); }
  // The bit in each word: six bits of the lower half after another multiplication each.
  static uint64_t bit(uint64_t hash, size_t word) {
    static constexpr uint32_t kOdd[8] = {0x47b6137b, 0x44974d91, 0x8824ad5b, 0xa2b7289d,
                                         0x705495c7, 0x2df1424b, 0x9efc4947, 0x5c6bfb31};
    return uint64_t{1} << (static_cast<uint32_t>(hash) * kOdd[word] >> 26);
  }
  static bool has(const Line& line, uint64_t hash) {
    uint64_t missing = 0;
    for (size_t i = 0; i < 8; ++i) missing |= bit(hash, i) & ~line.words[i];
    return missing == 0;
  }
  static bool add(Line& line, uint64_t hash) {  // whether it was not there
    uint64_t missing = 0;
    for (size_t i = 0; i < 8; ++i) {
      missing |= bit(hash, i) & ~line.words[i];
      line.words[i] |= bit(hash, i);
    }
    return missing != 0;
  }
  Line* map() const {
    const size_t size = lines_ * sizeof(Line);
    void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    return static_cast<Line*>(memory);
  }
  void turn() {
    std::swap(new_, old_);
    madvise(new_, lines_ * sizeof(Line), MADV_DONTNEED);  // reads as zeros from now on
    before_ = std::exchange(held_, 0);
  }

  size_t lines_, horizon_;
  Line *new_ = nullptr, *old_ = nullptr;
  size_t held_ = 0, before_ = 0;
  bool huge_ = false;  // whether huge pages are asked for
};

}  // namespace kv
