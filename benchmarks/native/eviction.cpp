// eviction TRACE POLICY BLOCKS: replay a trace on the store's own table and policy, without bytes.
//
// TRACE: u64 requests, then per request f64 seconds, u64 blocks, u64 names of its chain; all native.
// POLICY: as `kvrouter store --eviction` has them, or "min": Belady's, which knows the future.
// Prints one JSON object: requests, blocks asked for, hits, and both summed over depth (hits_depth,
// asked_depth: the quadratic part of what computing a prefix costs).
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "table/eviction/policy.h"
#include "memory/slab.h"
#include "table/table.h"

namespace {

using namespace kv;

constexpr uint64_t kBytes = 4096;  // of a block: the table only counts them
constexpr uint32_t kSpec = 1, kPart = 1;
constexpr uint64_t kSession = 1;
constexpr uint64_t kNever = UINT64_MAX;

struct Request {
  double at_s;
  std::vector<uint64_t> names;
};

struct Trace {
  std::vector<Request> requests;
  std::unordered_map<uint64_t, std::vector<uint64_t>> uses;  // of a name, by request
};

template <class Value>
Value read_one(std::ifstream& in) {
  Value value{};
  if (!in.read(reinterpret_cast<char*>(&value), sizeof value)) {
    std::fprintf(stderr, "eviction: the trace ends too early\n");
    std::exit(2);
  }
  return value;
}

Trace read_trace(const char* path) {
  std::ifstream in(path, std::ios::binary);
  Trace trace;
  trace.requests.resize(read_one<uint64_t>(in));
  for (size_t number = 0; number < trace.requests.size(); ++number) {
    Request& request = trace.requests[number];
    request.at_s = read_one<double>(in);
    request.names.resize(read_one<uint64_t>(in));
    for (uint64_t& name : request.names) {
      name = read_one<uint64_t>(in);
      trace.uses[name].push_back(number);
    }
  }
  return trace;
}

Hash hash_of(uint64_t name) {
  Hash hash{};
  std::memcpy(hash.bytes, &name, sizeof name);
  return hash;
}

// Evicts the block whose next use is farthest away. A parent is used whenever its child is, so that
// it never goes first: with prefixes, too, nothing does better.
class Belady final : public EvictionPolicy {
 public:
  Belady(const Trace& trace, const uint64_t& request) : trace_(trace), request_(request) {}

  void on_insert(Block& block, const Block*) override { block.last_use = next_use(block); }
  void on_hit(Block& block) override {
    if (block.evictable) leaves_.erase({block.last_use, &block});
    block.last_use = next_use(block);
    if (block.evictable) leaves_.emplace(block.last_use, &block);
  }
  void on_remove(Block& block) override { leaves_.erase({block.last_use, &block}); }
  void on_evictable(Block& block, bool evictable) override {
    if (evictable) leaves_.emplace(block.last_use, &block);
    else leaves_.erase({block.last_use, &block});
  }
  Block* victim() override { return leaves_.empty() ? nullptr : leaves_.rbegin()->second; }

 private:
  uint64_t next_use(const Block& block) const {
    uint64_t name = 0;
    std::memcpy(&name, block.key.hash.bytes, sizeof name);
    const std::vector<uint64_t>& uses = trace_.uses.at(name);
    const auto next = std::upper_bound(uses.begin(), uses.end(), request_);
    return next == uses.end() ? kNever : *next;
  }

  const Trace& trace_;
  const uint64_t& request_;
  std::set<std::pair<uint64_t, Block*>> leaves_;
};

struct Result {
  uint64_t asked = 0, hits = 0;
  double asked_depth = 0, hits_depth = 0;
};

// A request matches what is there, holds it, and puts the rest of its chain as far as there is room.
Result replay(const Trace& trace, uint64_t& number, Table& table) {
  Result result;
  const PartIds parts{kPart};
  for (number = 0; number < trace.requests.size(); ++number) {
    const Request& request = trace.requests[number];
    table.set_now(request.at_s);
    std::vector<Block*> held;
    std::optional<BlockKey> parent;
    bool hit = true;
    for (size_t depth = 0; depth < request.names.size(); ++depth) {
      const BlockKey key{kSpec, hash_of(request.names[depth])};
      Block* block = hit ? table.find_complete(key, parts) : nullptr;
      result.asked += 1, result.asked_depth += static_cast<double>(depth) + 0.5;
      if (block != nullptr) {
        table.touch(*block);
        result.hits += 1, result.hits_depth += static_cast<double>(depth) + 0.5;
      } else {
        hit = false;
        const auto place = table.reserve(key, parent, kPart, kBytes, kSession);
        if (place.status != BlockStatus::kGranted) break;
        table.commit(key, kPart, kSession, place.slot.generation, 0);
        block = table.find_complete(key, parts);
      }
      table.pin(*block);
      held.push_back(block);
      parent = key;
    }
    for (size_t depth = held.size(); depth < request.names.size(); ++depth) {
      if (depth == held.size() && !hit) continue;  // counted before its reservation failed
      result.asked += 1, result.asked_depth += static_cast<double>(depth) + 0.5;
    }
    for (Block* block : held) table.unpin(*block);
  }
  return result;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 4) return std::fprintf(stderr, "eviction TRACE POLICY BLOCKS\n"), 2;
  const Trace trace = read_trace(arguments[1]);
  const std::string name = arguments[2];
  uint64_t number = 0;
  std::unique_ptr<EvictionPolicy> policy =
      name == "min" ? std::make_unique<Belady>(trace, number) : make_eviction_policy(name);
  if (!policy) return std::fprintf(stderr, "eviction: no policy %s\n", name.c_str()), 2;
  Slab slab(std::strtoull(arguments[3], nullptr, 10) * kBytes, kBytes);
  Table table(slab, std::move(policy));
  const Result r = replay(trace, number, table);
  std::printf("{\"requests\": %zu, \"distinct\": %zu, \"asked\": %llu, \"hits\": %llu, ",
              trace.requests.size(), trace.uses.size(), static_cast<unsigned long long>(r.asked),
              static_cast<unsigned long long>(r.hits));
  std::printf("\"asked_depth\": %.1f, \"hits_depth\": %.1f}\n", r.asked_depth, r.hits_depth);
}
