#include "table/eviction/density.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace kv {
namespace {

// Touches within this time are one use: those of one request follow each other.
constexpr double kSameUse_s = 1.0;
constexpr unsigned kLeastEpochBits = 6;
constexpr size_t kEpochsPerPool = 8;  // at least so many epochs pass while the pool is used once
constexpr size_t kGonePerBlock = 2;   // names remembered for each block in memory
constexpr uint64_t kLeastBetweenLearning = 4096;  // uses: it takes a millisecond
constexpr double kDecay = 0.95;                   // of the counts, each time that it learns
constexpr double kPrior = 0.5;                    // weight of the prior, in observed epochs
constexpr double kMostPrior = 0.9;
constexpr double kLost = 0.02;  // a future that so few blocks reach is ignored
constexpr size_t kDepths = 8;   // classes; kMostDepths where they are not worth the same
// The depth at which a block takes twice the time of the first one: 20,000 tokens in blocks of 512.
// With 1.25, as for blocks of 16, about as many seconds are saved.
constexpr double kDoubled = 40;

}  // namespace

ReuseDensity::ReuseDensity(Objective objective)
    : objective_(objective), epoch_bits_(kLeastEpochBits), learn_at_(kLeastBetweenLearning),
      kinds_(kUses * (objective == Objective::kTokens ? kDepths : kMostDepths)) {
  for (size_t kind = 0; kind < kinds_.size(); ++kind) {
    const double depth = 0.75 * std::exp2(static_cast<double>(kind / kUses));
    if (objective_ == Objective::kSeconds) kinds_[kind].worth = std::sqrt(1 + depth / kDoubled);
    for (size_t age = 0; age < kAges; ++age)
      kinds_[kind].density[age] = kinds_[kind].worth / static_cast<double>(age + 1);
  }
  rank();
}

size_t ReuseDensity::class_of(uint32_t depth) const {
  const size_t width = std::bit_width(depth);
  if (objective_ == Objective::kSeconds) return std::min(width, kMostDepths - 1);
  return std::min((width + 1) / 2, kDepths - 1);
}

void ReuseDensity::List::take_all(List& other) {
  if (other.empty()) return;
  other.newer->older = older;
  older->newer = other.newer;
  other.older->newer = this;
  older = other.older;
  other.older = other.newer = &other;
}

size_t ReuseDensity::age_of(uint64_t use) const {
  return static_cast<size_t>(std::min<uint64_t>(epoch_ - epoch_of(use), kAges - 1));
}

void ReuseDensity::count_known(uint8_t kind, uint64_t last_use, int64_t change) {
  if (age_of(last_use) == kAges - 1) kinds_[kind].known_old += change;
  else kinds_[kind].known[epoch_of(last_use) % kAges] += change;
}

void ReuseDensity::count_reuse(uint8_t kind, uint64_t last_use) {
  kinds_[kind].reuses[age_of(last_use)] += 1;
  count_known(kind, last_use, -1);
}

ReuseDensity::List& ReuseDensity::list_of(uint8_t kind, uint64_t last_use) {
  if (age_of(last_use) == kAges - 1) return kinds_[kind].old_leaves;
  return kinds_[kind].leaves[epoch_of(last_use) % kAges];
}

ReuseDensity::List& ReuseDensity::list_at(Cell cell) {
  if (cell.age == kAges - 1) return kinds_[cell.kind].old_leaves;
  return kinds_[cell.kind].leaves[(epoch_ + kAges - cell.age) % kAges];
}

void ReuseDensity::use(Block& block, uint8_t uses) {
  advance();
  block.uses = uses;
  block.last_use = tick_;
  block.last_use_s = now_s_;
  block.kind = static_cast<uint8_t>(uses + kUses * class_of(block.depth));
  count_known(block.kind, block.last_use, 1);
}

void ReuseDensity::on_insert(Block& block, const Block* parent) {
  ++resident_;
  block.depth = parent == nullptr ? 0 : parent->depth + 1;
  uint8_t uses = 0;
  if (const auto found = gone_.find(BlockKeyHash()(block.key)); found != gone_.end()) {
    count_reuse(found->second.kind, found->second.last_use);
    uses = std::min<uint8_t>(found->second.uses + 1, kUses - 1);
    gone_.erase(found);
  }
  use(block, uses);
}

void ReuseDensity::on_hit(Block& block) {
  if (now_s_ - block.last_use_s < kSameUse_s) return;
  const bool evictable = block.evictable;
  if (evictable) on_evictable(block, false);
  count_reuse(block.kind, block.last_use);
  use(block, std::min<uint8_t>(block.uses + 1, kUses - 1));
  if (evictable) on_evictable(block, true);
}

void ReuseDensity::on_remove(Block& block) {
  if (block.evictable) on_evictable(block, false);
  --resident_;
  const uint64_t id = BlockKeyHash()(block.key);
  if (const auto other = gone_.find(id); other != gone_.end()) {
    count_known(other->second.kind, other->second.last_use, -1);
  }
  gone_[id] = {block.last_use, block.uses, block.kind};
  gone_order_.emplace_back(id, block.last_use);
  while (gone_order_.size() > kGonePerBlock * (resident_ + 1)) forget_oldest();
}

void ReuseDensity::forget_oldest() {
  const auto [id, last_use] = gone_order_.front();
  gone_order_.pop_front();
  const auto found = gone_.find(id);
  if (found == gone_.end() || found->second.last_use != last_use) return;
  count_known(found->second.kind, last_use, -1);
  gone_.erase(found);
}

void ReuseDensity::on_evictable(Block& block, bool evictable) {
  if (evictable) {
    List& list = list_of(block.kind, block.last_use);
    block.older = list.older;
    block.newer = &list;
    list.older->newer = &block;
    list.older = &block;
    first_ = std::min<size_t>(first_, rank_[block.kind][age_of(block.last_use)]);
  } else if (block.older != nullptr) {
    block.older->newer = block.newer;
    block.newer->older = block.older;
    block.older = block.newer = nullptr;
  }
}

Block* ReuseDensity::victim() {
  for (; first_ < cells_.size(); ++first_) {
    const List& list = list_at(cells_[first_]);
    if (!list.empty()) return static_cast<Block*>(static_cast<EvictionMark*>(list.newer));
  }
  return nullptr;
}

void ReuseDensity::advance() {
  ++tick_;
  if (epoch_of(tick_) == epoch_) return;
  end_epoch();
  if (resident_ / kEpochsPerPool > (size_t{2} << epoch_bits_)) lengthen_epochs();
  first_ = 0;  // all lists are an epoch older
  if (tick_ < learn_at_) return;
  learn();
  rank();
  learn_at_ = tick_ + std::max<uint64_t>(resident_, kLeastBetweenLearning);
}

void ReuseDensity::end_epoch() {
  for (Kind& kind : kinds_) {
    for (size_t age = 0; age + 1 < kAges && age <= epoch_; ++age) {
      const auto known =
          static_cast<double>(std::max<int64_t>(kind.known[(epoch_ - age) % kAges], 0));
      kind.exposure[age] += age == 0 ? known / 2 : known;
    }
    kind.exposure[kAges - 1] += static_cast<double>(std::max<int64_t>(kind.known_old, 0));
  }
  ++epoch_;
  if (epoch_ + 1 < kAges) return;
  const size_t turned_old = (epoch_ + 1) % kAges;  // of age kAges - 1 now
  for (Kind& kind : kinds_) {
    kind.known_old += std::exchange(kind.known[turned_old], 0);
    kind.old_leaves.take_all(kind.leaves[turned_old]);
  }
}

// Two epochs become one: the pool holds more blocks than the epochs were made for. Old blocks stay
// old, and are miscounted until they are evicted.
void ReuseDensity::lengthen_epochs() {
  const uint64_t before = epoch_;
  ++epoch_bits_;
  epoch_ = epoch_of(tick_);
  for (Kind& kind : kinds_) {
    PerAge<List> leaves;
    PerAge<int64_t> known{};
    for (size_t age = std::min<uint64_t>(kAges - 2, before) + 1; age-- > 0;) {
      const uint64_t epoch = before - age;
      leaves[(epoch / 2) % kAges].take_all(kind.leaves[epoch % kAges]);
      known[(epoch / 2) % kAges] += kind.known[epoch % kAges];
    }
    for (size_t slot = 0; slot < kAges; ++slot) kind.leaves[slot].take_all(leaves[slot]);
    kind.known = known;
    for (size_t age = 0; age < kAges; ++age) {
      const size_t from = 2 * age, last = std::min(from + 2, kAges);
      double reuses = 0, exposure = 0;
      for (size_t old = from; old < last; ++old) {
        reuses += kind.reuses[old];
        exposure += kind.exposure[old] / 2;
      }
      kind.reuses[age] = reuses;
      kind.exposure[age] = exposure;
    }
  }
}

// The share of all blocks of an age that is used again in an epoch. At ages with few observations,
// use is assumed to get less likely with age.
ReuseDensity::PerAge<double> ReuseDensity::usual_hazard(double believed) const {
  PerAge<double> reuses{}, exposure{}, hazard{};
  double all_reuses = 0, all_exposure = 0;
  for (const Kind& kind : kinds_) {
    for (size_t age = 0; age < kAges; ++age) {
      reuses[age] += kind.reuses[age], exposure[age] += kind.exposure[age];
      all_reuses += kind.reuses[age], all_exposure += kind.exposure[age];
    }
  }
  const double mean = all_exposure > 0 ? all_reuses / all_exposure : kMostPrior;
  for (size_t age = 0; age < kAges; ++age) {
    const double prior = std::min(kMostPrior, mean / static_cast<double>(age + 1));
    hazard[age] = (reuses[age] + believed * prior) / (exposure[age] + believed);
  }
  return hazard;
}

// Per age, the most that uses are worth per epoch over all moments of eviction, if `used` are used
// again per age.
ReuseDensity::PerAge<double> ReuseDensity::best_futures(const PerAge<double>& used, double worth) {
  PerAge<double> density{};
  for (size_t age = 0; age < kAges; ++age) {
    double uses = 0, time = 0, alive = 1;
    for (size_t at = age; at < kAges && alive > kLost; ++at) {
      uses += alive * used[at];
      time += alive * (1 - used[at] / 2);
      density[age] = std::max(density[age], worth * uses / time);
      alive *= 1 - used[at];
    }
  }
  return density;
}

// A kind with few observations counts as the average of all kinds.
void ReuseDensity::learn() {
  const double believed = kPrior * static_cast<double>(uint64_t{1} << epoch_bits_);
  const PerAge<double> usual = usual_hazard(believed);
  for (Kind& kind : kinds_) {
    PerAge<double> used{};
    for (size_t age = 0; age < kAges; ++age) {
      const double hazard =
          (kind.reuses[age] + believed * usual[age]) / (kind.exposure[age] + believed);
      used[age] = 1 - std::exp(-hazard);
      kind.reuses[age] *= kDecay, kind.exposure[age] *= kDecay;
    }
    kind.density = best_futures(used, kind.worth);
  }
}

void ReuseDensity::rank() {
  if (cells_.empty()) {
    for (size_t kind = 0; kind < kinds_.size(); ++kind)
      for (size_t age = 0; age < kAges; ++age)
        cells_.push_back({static_cast<uint8_t>(kind), static_cast<uint8_t>(age)});
  }
  std::sort(cells_.begin(), cells_.end(), [this](Cell a, Cell b) {
    const double one = kinds_[a.kind].density[a.age], other = kinds_[b.kind].density[b.age];
    return one != other ? one < other : a.age != b.age ? a.age > b.age : a.kind < b.kind;
  });
  for (size_t i = 0; i < cells_.size(); ++i)
    rank_[cells_[i].kind][cells_[i].age] = static_cast<uint16_t>(i);
  first_ = 0;
}

}  // namespace kv
