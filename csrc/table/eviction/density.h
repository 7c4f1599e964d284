// Keeps the blocks with the most expected uses per time in memory, as learned from past uses.
//
// After LHD (Beckmann, Chen, Cidon, "Improving cache hit rate by maximizing hit density", NSDI
// 2018) with two changes. Reuses are learned beyond the life of a block in memory: evicted names
// are remembered for a while, else nothing could be learned about ages that no block reaches. And a
// block of some age is worth its best future (Gittins' index): the most uses per time over all
// moments of evicting it, since it can be evicted at that moment.
#pragma once

#include <array>
#include <deque>

#include "table/eviction/policy.h"
#include "table/table.h"

namespace kv {

// Blocks have kinds, by their number of uses and their depth in the chain; ages are counted in
// epochs. Per kind and age: how many blocks were used again (`reuses`) of how many there were
// (`exposure`, per epoch). Evictable blocks are in a list per kind and epoch of their last use. The
// lists are ranked once an epoch, so that a victim is found without looking at blocks.
//
// For seconds of prefill, a use of a block counts by the square root of the time to compute it:
// that grows with its depth. By the time itself, long prompts would leave too little for others.
class ReuseDensity final : public EvictionPolicy {
 public:
  enum class Objective : uint8_t { kTokens, kSeconds };
  explicit ReuseDensity(Objective objective = Objective::kTokens);
  void set_now(double now_s) override { now_s_ = now_s; }
  void on_insert(Block& block, const Block* parent) override;
  void on_hit(Block& block) override;
  void on_remove(Block& block) override;
  void on_evictable(Block& block, bool evictable) override;
  Block* victim() override;

 private:
  static constexpr size_t kUses = 4, kMostDepths = 16, kMostKinds = kUses * kMostDepths;
  static constexpr size_t kAges = 96;  // the last one: that old or older

  template <class Value> using PerAge = std::array<Value, kAges>;

  struct List : EvictionLink {
    List() { older = newer = this; }
    List(const List&) = delete;
    List& operator=(const List&) = delete;
    bool empty() const { return newer == this; }
    void take_all(List& other);
  };
  struct Kind {
    double worth = 1;  // of a use
    PerAge<double> reuses{}, exposure{}, density{};
    // By epoch of last use modulo kAges; of blocks in memory and of remembered names.
    PerAge<int64_t> known{};
    int64_t known_old = 0;
    PerAge<List> leaves;
    List old_leaves;
  };
  struct Gone {
    uint64_t last_use;
    uint8_t uses;
    uint8_t kind;
  };
  struct Cell {
    uint8_t kind;
    uint8_t age;
  };

  uint64_t epoch_of(uint64_t use) const { return use >> epoch_bits_; }
  size_t age_of(uint64_t use) const;
  size_t class_of(uint32_t depth) const;
  void count_known(uint8_t kind, uint64_t last_use, int64_t change);
  void count_reuse(uint8_t kind, uint64_t last_use);
  List& list_of(uint8_t kind, uint64_t last_use);
  List& list_at(Cell cell);
  void use(Block& block, uint8_t uses);
  void advance();
  void end_epoch();
  void lengthen_epochs();
  PerAge<double> usual_hazard(double believed) const;
  static PerAge<double> best_futures(const PerAge<double>& used, double worth);
  void learn();
  void rank();
  void forget_oldest();

  Objective objective_;
  double now_s_ = 0;
  uint64_t tick_ = 0;  // uses so far
  unsigned epoch_bits_;
  uint64_t epoch_ = 0;
  uint64_t learn_at_;
  size_t resident_ = 0;
  std::vector<Kind> kinds_;
  std::vector<Cell> cells_;  // by density, least first
  std::array<PerAge<uint16_t>, kMostKinds> rank_{};
  size_t first_ = 0;                                      // no cell before it has leaves
  std::unordered_map<uint64_t, Gone> gone_;               // by hashed name
  std::deque<std::pair<uint64_t, uint64_t>> gone_order_;  // hashed name, last use
};

}  // namespace kv
