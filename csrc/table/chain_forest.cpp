#include "table/chain_forest.h"

#include <algorithm>

namespace kv {

void ChainForest::raise(Node* node, uint32_t by) {
  if (node == nullptr) return;
  node->holds += by;
  node->least += by;
  node->pending += by;
}

void ChainForest::push(Node& node) {
  if (node.pending == 0) return;
  raise(node.above, node.pending);
  raise(node.below, node.pending);
  node.pending = 0;
}

void ChainForest::pull(Node& node) {
  node.least = node.holds;
  for (const Node* child : {node.above, node.below})
    if (child != nullptr) node.least = std::min(node.least, child->least);
  node.least_bytes = node.holds == node.least ? node.bytes : 0;
  for (const Node* child : {node.above, node.below})
    if (child != nullptr && child->least == node.least) node.least_bytes += child->least_bytes;
}

// The node takes the place of its parent in their splay tree.
void ChainForest::rotate(Node& node) {
  Node& old = *node.up;
  if (!is_splay_root(old)) (old.up->above == &old ? old.up->above : old.up->below) = &node;
  node.up = old.up;
  const bool is_above = old.above == &node;
  Node*& inner = is_above ? node.below : node.above;
  (is_above ? old.above : old.below) = inner;
  if (inner != nullptr) inner->up = &old;
  inner = &old;
  old.up = &node;
  pull(old);
}

// Makes the node the root of its splay tree, with nothing pending on it.
void ChainForest::splay(Node& node) {
  path_.assign(1, &node);
  while (!is_splay_root(*path_.back())) path_.push_back(path_.back()->up);
  steps_ += path_.size();
  for (auto at = path_.rbegin(); at != path_.rend(); ++at) push(**at);
  while (!is_splay_root(node)) {
    Node& over = *node.up;
    if (!is_splay_root(over)) {
      const bool straight = (over.up->above == &over) == (over.above == &node);
      rotate(straight ? over : node);
    }
    rotate(node);
  }
  pull(node);
}

// Makes the nodes from the root down to this one a splay tree of their own, with this as its root.
void ChainForest::reach(Node& node) {
  Node* lower = nullptr;
  for (Node* at = &node; at != nullptr; at = at->up) {
    splay(*at);
    at->below = lower;
    pull(*at);
    lower = at;
  }
  splay(node);
}

// Adds holds to all nodes of a path, given by the root of its splay tree; null: to none.
uint64_t ChainForest::add(Node* path, uint32_t holds) {
  if (path == nullptr || holds == 0) return 0;
  const uint64_t free_before = free_bytes(*path);
  raise(path, holds);
  return free_before - free_bytes(*path);
}

uint64_t ChainForest::hang(Node& child, Node& parent) {
  reach(child);
  reach(parent);
  child.up = &parent;
  return add(&parent, child.holds);
}

uint64_t ChainForest::cut(Node& node) {
  reach(node);
  Node* const path = node.above;
  if (path == nullptr) return 0;
  path->up = nullptr;
  node.above = nullptr;
  pull(node);
  return add(path, 0 - node.holds);
}

bool ChainForest::has_root(Node& node, const Node& root) {
  reach(node);
  Node* top = &node;
  for (; top->above != nullptr; top = top->above) ++steps_;
  splay(*top);
  return top == &root;
}

uint64_t ChainForest::grow(Node& node, uint64_t bytes) {
  reach(node);
  node.bytes += bytes;
  pull(node);
  return node.holds == 0 ? 0 : bytes;
}

}  // namespace kv
