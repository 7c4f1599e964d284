// The share of prompt tokens that a store of any size would find, from a sample of all blocks, as
// in SHARDS (Waldspurger et al., FAST 2015): a block is sampled if its name is small. What was used
// since its last use is what a store must hold to still have it, if it evicts the least recently
// used prefix, the end of a chain first. So what it finds are leading blocks. One thread.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <unordered_map>
#include <utility>
#include <vector>

namespace kv {

// A prompt: its whole blocks, each of so many tokens and bytes of KV, and the tokens of all of it.
struct AskedPrompt {
  const uint8_t* hashes;  // 32 bytes for each block
  size_t blocks;
  uint64_t model;  // blocks of other models have other KV
  uint64_t block_tokens, block_bytes;
  double tokens;
};

class MissRatioCurve {
 public:
  // Tokens for which each sampled block stands at least: to look one up takes time.
  static constexpr uint64_t kFinestTokens = 1024;

  // Samples at most `most` blocks. Prompts of `day_s` ago count half; older blocks are forgotten.
  MissRatioCurve(size_t most, double day_s)
      : most_(most), day_s_(day_s), needed_(kNever + 1), tree_(2 * most + 1) {}

  void see(const AskedPrompt& prompt, double now_s) {
    const uint64_t finest = std::max<uint64_t>(1, kFinestTokens / prompt.block_tokens);
    if (each_ < prompt.block_bytes * finest) set_each(prompt.block_bytes * finest, now_s);
    if (asked_ == 0) began_s_ = now_s;
    const double weight = std::exp2(std::min((now_s - began_s_) / day_s_, kMostDays));
    const double tokens = weight * static_cast<double>(prompt.block_tokens);
    asked_ += weight * prompt.tokens;
    whole_ += tokens * static_cast<double>(prompt.blocks);
    sampled_.clear();
    for (size_t at = 0; at < prompt.blocks; ++at) {
      uint64_t name;
      std::memcpy(&name, prompt.hashes + 32 * at + 24, sizeof name);
      name = __builtin_bswap64(name);  // as KV events have it
      if (name >= bound_ * prompt.block_bytes) continue;
      sampled_.push_back({name ^ prompt.model, name / prompt.block_bytes, now_s});
      needed_[class_of(sampled_.back(), prompt.block_bytes)] +=
          tokens * static_cast<double>(each_) / static_cast<double>(prompt.block_bytes);
    }
    for (auto use = sampled_.rbegin(); use != sampled_.rend(); ++use) touch(*use);
    while (live_ > most_) set_each(2 * each_, now_s);
  }
  // For a store of so many bytes. Not a number if there was no prompt.
  double found(double bytes) const {
    const double place = std::min(kSteps * std::log2(std::max(bytes, 1.0)), double{kNever});
    const auto at = static_cast<size_t>(place);
    const auto larger = needed_.begin() + static_cast<ptrdiff_t>(at) + 1;
    // Of the class of this size, a part needs more.
    const double part = static_cast<double>(at + 1) - place;
    const double missed = std::accumulate(larger, needed_.end(), needed_[at] * part);
    return std::clamp((whole_ - missed) / asked_, 0.0, 1.0);
  }
  // About how many bytes all blocks have that are not forgotten.
  uint64_t bytes() const { return live_ * each_; }

 private:
  static constexpr int kSteps = 8;  // classes of sizes from one power of two to the next
  static constexpr size_t kNever = 64 * kSteps;  // the class of blocks that were not used before
  static constexpr double kMostDays = 1000;      // so that weights stay numbers

  struct Use {
    uint64_t block;
    uint64_t rank;  // of its name: below `bound_` it is sampled
    double at_s;
  };

  size_t class_of(const Use& use, uint64_t bytes) const {
    const auto found = where_.find(use.block);
    if (found == where_.end() || use.at_s - uses_[found->second].at_s > day_s_) return kNever;
    const double since = static_cast<double>(live_ - used_upto(found->second));
    const double needed = since * static_cast<double>(each_) + static_cast<double>(bytes);
    return std::min(static_cast<size_t>(kSteps * std::log2(needed)), kNever - 1);
  }
  void touch(const Use& use) {
    while (uses_.size() == 2 * most_) set_each(live_ > most_ ? 2 * each_ : each_, use.at_s);
    if (use.rank >= bound_) return;
    const auto found = where_.find(use.block);
    if (found != where_.end()) {
      uses_[found->second].rank = std::numeric_limits<uint64_t>::max();  // not the last use
      count(found->second, -1);
    }
    append(use);
  }
  void append(const Use& use) {
    where_[use.block] = uses_.size();
    count(uses_.size(), 1);
    uses_.push_back(use);
  }
  // Let each sampled block stand for so many bytes. Those with too large a name leave, and old ones.
  void set_each(uint64_t each, double now_s) {
    each_ = each;
    bound_ = std::numeric_limits<uint64_t>::max() / each;
    const std::vector<Use> before = std::exchange(uses_, {});
    where_.clear(), live_ = 0;
    tree_.assign(tree_.size(), 0);
    for (const Use& use : before) {
      if (use.rank < bound_ && now_s - use.at_s <= day_s_) append(use);
    }
  }
  // A Fenwick tree counts the uses in each part of `uses_` that are their block's last one.
  void count(size_t at, int64_t more) {
    live_ += static_cast<uint64_t>(more);
    for (++at; at < tree_.size(); at += at & -at) tree_[at] += more;
  }
  uint64_t used_upto(size_t at) const {
    int64_t sum = 0;
    for (++at; at != 0; at &= at - 1) sum += tree_[at];
    return static_cast<uint64_t>(sum);
  }

  const size_t most_;
  const double day_s_;
  double began_s_ = 0;
  double asked_ = 0, whole_ = 0;  // tokens of prompts, and of whole blocks
  std::vector<double> needed_;    // tokens by the class of the size that a store needs to find them
  uint64_t each_ = 1;             // bytes for which each sampled block stands
  uint64_t bound_ = std::numeric_limits<uint64_t>::max();
  uint64_t live_ = 0;
  std::vector<Use> uses_;                       // in their order
  std::unordered_map<uint64_t, size_t> where_;  // the last use of each block
  std::vector<int64_t> tree_;
  std::vector<Use> sampled_;  // of the prompt that is looked at
};

}  // namespace kv
