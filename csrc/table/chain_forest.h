// The chains of blocks as trees, and which blocks cannot be evicted because of blocks after them.
// Each operation takes O(log n) amortised, however long a chain is.
//
// Link-cut trees: Sleator and Tarjan, "A data structure for dynamic trees", JCSS 26 (1983), with
// splay trees as in their "Self-adjusting binary search trees", JACM 32 (1985). The paths from a
// root are kept in splay trees, ordered by depth. A number of holds is added to a whole path at
// once. Each splay tree keeps the least number of holds in it, and the bytes of the nodes with that
// number: if it is 0, the bytes that nothing holds.
#pragma once

#include <cstdint>
#include <vector>

namespace kv {

// A node is held while there is a hold on it or on a node below it. The caller owns the nodes. Each
// function that can change how many bytes are held returns the difference, modulo 2^64.
class ChainForest {
 public:
  class Node {
   public:
    Node() = default;
    Node(const Node&) = delete;
    Node& operator=(const Node&) = delete;

   private:
    friend class ChainForest;
    // The parent in the splay tree; at the root of that, the parent of the path's top node.
    Node* up = nullptr;
    Node* above = nullptr;  // in the splay tree: nearer to the root of the forest's tree
    Node* below = nullptr;
    uint64_t bytes = 0;
    uint64_t least_bytes = 0;  // in its splay subtree, of nodes with `least` holds
    uint32_t holds = 0;        // on it and below it
    uint32_t least = 0;        // of the holds in its splay subtree
    uint32_t pending = 0;      // to be added in its splay subtree without itself; modulo 2^32
  };

  // `child` has no parent, and `parent` is not below it.
  uint64_t hang(Node& child, Node& parent);
  // Takes the node, with all below it, from its parent, if any. A node alone may be destroyed.
  uint64_t cut(Node& node);
  // Whether `root`, which has no parent, is the node or above it.
  bool has_root(Node& node, const Node& root);
  uint64_t hold(Node& node) { return reach(node), add(&node, 1); }
  uint64_t let_go(Node& node) { return reach(node), add(&node, ~uint32_t{0}); }
  // The node has `bytes` more; modulo 2^64.
  uint64_t grow(Node& node, uint64_t bytes);

  // Nodes visited so far; the time of all calls is proportional to it.
  uint64_t steps() const { return steps_; }

 private:
  static bool is_splay_root(const Node& node) {
    return node.up == nullptr || (node.up->above != &node && node.up->below != &node);
  }
  static uint64_t free_bytes(const Node& path) { return path.least == 0 ? path.least_bytes : 0; }
  static void raise(Node* node, uint32_t by);
  static void push(Node& node);
  static void pull(Node& node);
  static void rotate(Node& node);
  void splay(Node& node);
  void reach(Node& node);
  uint64_t add(Node* path, uint32_t holds);

  uint64_t steps_ = 0;
  std::vector<Node*> path_;  // scratch
};

}  // namespace kv
