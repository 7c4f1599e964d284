// Trees of blocks: what is held, against a slow model, and how many steps that takes.
#include "table/chain_forest.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "check.h"

namespace {

using namespace kv;
using Node = ChainForest::Node;

// Nodes with their parents, held as the rule says: a node with a hold, and all above it.
struct Model {
  struct Entry {
    int parent = -1;
    bool hold = false;
    uint64_t bytes = 0;
  };
  explicit Model(size_t count) : entries(count) {}

  bool above(int node, int other) const {
    for (; other != -1; other = entries[static_cast<size_t>(other)].parent)
      if (other == node) return true;
    return false;
  }
  int root(int node) const {
    while (entries[static_cast<size_t>(node)].parent != -1)
      node = entries[static_cast<size_t>(node)].parent;
    return node;
  }
  uint64_t held_bytes() const {
    std::vector<bool> held(entries.size());
    for (size_t i = 0; i < entries.size(); ++i)
      for (int at = entries[i].hold ? static_cast<int>(i) : -1; at != -1;
           at = entries[static_cast<size_t>(at)].parent)
        held[static_cast<size_t>(at)] = true;
    uint64_t bytes = 0;
    for (size_t i = 0; i < entries.size(); ++i) bytes += held[i] ? entries[i].bytes : 0;
    return bytes;
  }
  std::vector<Entry> entries;
};

void any_history_holds_what_the_rule_says() {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    std::mt19937_64 random(seed);
    const size_t count = 2 + seed;
    ChainForest forest;
    Model model(count);
    std::vector<std::unique_ptr<Node>> nodes;
    for (size_t i = 0; i < count; ++i) nodes.push_back(std::make_unique<Node>());
    uint64_t held = 0;
    for (int step = 0; step < 1500; ++step) {
      const int i = static_cast<int>(random() % count), k = static_cast<int>(random() % count);
      Node& node = *nodes[static_cast<size_t>(i)];
      Model::Entry& entry = model.entries[static_cast<size_t>(i)];
      const int root = model.root(k);
      switch (random() % 5) {
        case 0:
          CHECK(forest.has_root(node, *nodes[static_cast<size_t>(root)]) ==
                (model.root(i) == root));
          break;
        case 1:
          if (entry.parent != -1 || model.above(i, k)) break;
          entry.parent = k;
          held += forest.hang(node, *nodes[static_cast<size_t>(k)]);
          break;
        case 2:
          entry.parent = -1;
          held += forest.cut(node);
          break;
        case 3:
          entry.hold = !entry.hold;
          held += entry.hold ? forest.hold(node) : forest.let_go(node);
          break;
        case 4: {
          const uint64_t bytes = random() % 100;
          held += forest.grow(node, bytes - entry.bytes);
          entry.bytes = bytes;
          break;
        }
      }
      CHECK(held == model.held_bytes());
    }
  }
}

struct Chain {
  explicit Chain(size_t count) {
    for (size_t i = 0; i < count; ++i) {
      nodes.push_back(std::make_unique<Node>());
      if (i != 0) forest.hang(*nodes[i], *nodes[i - 1]);
      forest.hold(*nodes[i]);
      forest.grow(*nodes[i], 1);
      forest.let_go(*nodes[i]);
    }
  }
  Node& at(size_t i) { return *nodes[i]; }
  // Steps that an act takes.
  uint64_t of(const std::function<void()>& act) {
    const uint64_t before = forest.steps();
    act();
    return forest.steps() - before;
  }
  ChainForest forest;
  std::vector<std::unique_ptr<Node>> nodes;
};

void a_chain_is_built_in_as_many_steps_as_it_has_blocks() {
  for (const size_t count : {1'000u, 100'000u}) CHECK(Chain(count).forest.steps() <= 16 * count);
}

void the_end_of_a_long_chain_is_held_and_let_go_in_few_steps() {
  constexpr size_t kCount = 100'000;
  Chain chain(kCount);
  uint64_t held = 0;
  CHECK(chain.of([&] {
    for (size_t i = 0; i < kCount; ++i) {
      held = chain.forest.hold(chain.at(kCount - 1));
      chain.forest.let_go(chain.at(kCount - 1));
    }
  }) <= 8 * kCount);
  CHECK(held == kCount);
}

void two_long_chains_in_turn_take_few_steps_each() {
  constexpr size_t kCount = 50'000;
  Chain chain(2);
  Node root;
  std::vector<std::unique_ptr<Node>> ends[2];
  const uint64_t steps = chain.of([&] {
    for (size_t i = 0; i < kCount; ++i)
      for (auto& end : ends) {
        Node& above = end.empty() ? root : *end.back();
        end.push_back(std::make_unique<Node>());
        chain.forest.hang(*end.back(), above);
        CHECK(chain.forest.grow(*end.back(), 1) == 0);
        CHECK(chain.forest.hold(*end.back()) == i + 1);
        CHECK(chain.forest.let_go(*end.back()) == 0 - (i + 1));
      }
  });
  CHECK(steps <= 50 * kCount);
}

void any_block_of_a_long_chain_takes_as_many_steps_as_its_length_has_digits() {
  constexpr size_t kCount = 100'000;
  Chain chain(kCount);
  std::mt19937_64 random(3);
  CHECK(chain.of([&] {
    for (size_t i = 0; i < kCount; ++i) {
      Node& node = chain.at(random() % kCount);
      chain.forest.hold(node);
      chain.forest.let_go(node);
    }
  }) <= 60 * kCount);
}

}  // namespace

int main() {
  any_history_holds_what_the_rule_says();
  a_chain_is_built_in_as_many_steps_as_it_has_blocks();
  the_end_of_a_long_chain_is_held_and_let_go_in_few_steps();
  two_long_chains_in_turn_take_few_steps_each();
  any_block_of_a_long_chain_takes_as_many_steps_as_its_length_has_digits();
}
