// Sets of holders (engines, by number). Equal sets are kept once and counted, as the blocks of a
// run have the same holders. Bounded. One thread at a time.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

namespace kv {

inline constexpr unsigned kMaxHolders = 2048;

inline unsigned lowest(uint64_t bits) { return static_cast<unsigned>(std::countr_zero(bits)); }

// A set to calculate with. Only its words that are not 0 are valid.
struct HolderGroup {
  uint32_t present = 0;  // a bit for each valid word
  std::array<uint64_t, kMaxHolders / 64> words;

  uint64_t word(unsigned i) const { return (present >> i & 1) != 0 ? words[i] : 0; }
  bool has(unsigned holder) const { return (word(holder / 64) >> holder % 64 & 1) != 0; }
  void assign(unsigned i, uint64_t word) {
    words[i] = word;
    present = word != 0 ? present | 1u << i : present & ~(1u << i);
  }
  void set(unsigned holder, bool held) {
    const uint64_t bit = 1ull << holder % 64, others = word(holder / 64) & ~bit;
    assign(holder / 64, held ? others | bit : others);
  }
  // Returns whether it had any of them.
  bool remove(const HolderGroup& others) {
    bool any = false;
    for (uint32_t both = present & others.present; both != 0; both &= both - 1) {
      const unsigned i = lowest(both);
      any |= (words[i] & others.words[i]) != 0;
      assign(i, words[i] & ~others.words[i]);
    }
    return any;
  }
};

// A set that blocks share, followed by its words that are not 0. nullptr: of nobody.
struct HolderSet {
  HolderSet* next;  // of its bucket
  uint32_t references, hash, present;

  uint64_t* words() { return reinterpret_cast<uint64_t*>(this + 1); }
};

class HolderSets {
 public:
  explicit HolderSets(size_t max_blocks)
      : buckets_(max_blocks / 3 + 1), max_bytes_(22 * max_blocks + 3 * kAlone) {}
  HolderSets(const HolderSets&) = delete;
  ~HolderSets() {
    for (HolderSet* set : buckets_) {
      while (set != nullptr) ::operator delete(std::exchange(set, set->next));
    }
  }

  static HolderGroup members(HolderSet* set) {
    HolderGroup group;
    if (set == nullptr) return group;
    const uint64_t* word = set->words();
    group.present = set->present;
    for (uint32_t rest = group.present; rest != 0; rest &= rest - 1) {
      group.words[lowest(rest)] = *word++;
    }
    return group;
  }

  // Makes of a reference to `set` one to the set of this group. False: there is no room, and nothing
  // has changed. There is always room for one holder in place of nobody.
  bool replace(HolderSet*& set, const HolderGroup& group) {
    std::array<uint64_t, kMaxHolders / 64> made;
    size_t size = 0;
    uint64_t hash = group.present * 0xbf58476d1ce4e5b9ull;
    for (uint32_t rest = group.present; rest != 0; rest &= rest - 1) {
      made[size] = group.words[lowest(rest)];
      hash = (hash ^ made[size++]) * 0x9e3779b97f4a7c15ull;
      hash ^= hash >> 32;
    }
    const auto key = static_cast<uint32_t>(hash);
    HolderSet* to = size == 0 ? nullptr : bucket(key);
    while (to != nullptr && !(to->hash == key && to->present == group.present &&
                              std::equal(to->words(), to->words() + size, made.data()))) {
      to = to->next;
    }
    if (to == nullptr && size != 0) {
      const size_t bytes = bytes_of(group.present);
      if (set != nullptr && bytes_ + bytes > max_bytes_) return false;
      to = new (::operator new(bytes)) HolderSet{bucket(key), 0, key, group.present};
      std::copy(made.begin(), made.begin() + size, to->words());
      bucket(key) = to;
      bytes_ += bytes;
    }
    release(std::exchange(set, acquire(to)));
    return true;
  }

  // The same for the set with `holder` or without it. The blocks of a run mostly ask for the same.
  bool change(HolderSet*& set, unsigned holder, bool held) {
    if (set != from_ || holder * 2 + held != asked_) {
      HolderGroup group = members(set);
      group.set(holder, held);
      HolderSet* to = acquire(set);
      if (!replace(to, group)) return release(to), false;
      release(std::exchange(from_, acquire(set)));
      release(std::exchange(to_, to));
      asked_ = holder * 2 + held;
    }
    release(std::exchange(set, acquire(to_)));
    return true;
  }

  void release(HolderSet* set) {
    if (set == nullptr || --set->references != 0) return;
    HolderSet** link = &bucket(set->hash);
    while (*link != set) link = &(*link)->next;
    *link = set->next;
    bytes_ -= bytes_of(set->present);
    ::operator delete(set);
  }

  size_t memory_bytes() const { return max_bytes_ + kAlone + buckets_.size() * sizeof(HolderSet*); }

 private:
  // With what the allocator adds at most.
  static constexpr size_t bytes_of(uint32_t present) {
    return sizeof(HolderSet) + static_cast<size_t>(std::popcount(present)) * sizeof(uint64_t) + 16;
  }
  static constexpr size_t kAlone = kMaxHolders * 48;  // sets of one holder
  static HolderSet* acquire(HolderSet* set) {
    if (set != nullptr) ++set->references;
    return set;
  }
  HolderSet*& bucket(uint32_t hash) { return buckets_[(hash * uint64_t{buckets_.size()}) >> 32]; }

  std::vector<HolderSet*> buckets_;
  size_t max_bytes_;
  size_t bytes_ = 0;
  HolderSet* from_ = nullptr;  // what `change` did last, with references
  HolderSet* to_ = nullptr;
  unsigned asked_ = kMaxHolders * 2;
};

}  // namespace kv
