#include <algorithm>
#include <array>
#include <chrono>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "copy_plan.h"
#include "copy_runs.h"

namespace {

using namespace kv;

std::mt19937_64 rng(11);

uint64_t pick(uint64_t below) { return rng() % below; }

// Layer, plane, head, token, element: and where its bytes begin, found by walking the order.
using Coordinates = std::array<uint64_t, kAxes>;
using Places = std::map<Coordinates, uint64_t>;

class Walk {
 public:
  explicit Walk(const PartShape& shape) : shape_(shape) { visit(0); }
  Places places;

 private:
  void visit(size_t depth) {
    if (depth == shape_.order.size()) {
      places[at_] = cursor_;
      cursor_ += shape_.element_bytes;
      return;
    }
    const Axis axis = static_cast<Axis>(std::string("LKHTE").find(shape_.order[depth]));
    const std::array<uint64_t, kAxes> counts{
        shape_.layers.size(), shape_.elements[1] != 0 ? 2u : 1u, shape_.heads.size(),
        shape_.tokens, shape_.elements[at_[kPlane]]};
    for (at_[axis] = 0; at_[axis] < counts[axis]; ++at_[axis]) {
      const uint64_t begin = cursor_;
      visit(depth + 1);
      if (axis == kLayer && shape_.page_bytes != 0) cursor_ = begin + shape_.page_bytes;
    }
    at_[axis] = 0;
  }

  const PartShape& shape_;
  Coordinates at_{};
  uint64_t cursor_ = 0;
};

// Blocks in memory of exactly the bytes that they need, so that a sanitizer sees a byte too far.
struct Blocks {
  std::vector<std::unique_ptr<uint8_t[]>> pieces;
  Segments segments;
  size_t blocks;

  Blocks(const PartShape& shape, size_t count) : blocks(count) {
    std::string why;
    std::vector<uint64_t> sizes = shape.segments;
    if (sizes.empty()) sizes = {strides_of(shape, why)->block_bytes};
    for (const uint64_t size : sizes) {
      pieces.push_back(std::make_unique<uint8_t[]>(size * count));
      segments.bases.push_back(reinterpret_cast<uintptr_t>(pieces.back().get()));
      segments.strides.push_back(static_cast<int64_t>(size));
      segments.sizes.push_back(size);
      segments.block_bytes += size;
    }
  }
  uint8_t& byte(size_t block, uint64_t at) {
    size_t k = 0;
    for (; at >= segments.sizes[k]; ++k) at -= segments.sizes[k];
    return segments.at(k, block)[at];
  }
};

const std::array<const char*, 9> kOrders{"LKHTE", "LKTHE", "LHTKE", "KLTHE", "LKHET",
                                         "TLKHE", "HLKTE", "LTHKE", "ETHKL"};

PartShape random_shape(Extent layers, Extent heads, uint64_t tokens,
                       std::array<uint64_t, 2> elements, uint64_t element_bytes) {
  PartShape shape{layers, heads, tokens, elements, element_bytes, kOrders[pick(kOrders.size())], 0, {}};
  if (elements[0] != elements[1] && shape.order == "ETHKL") shape.order = "LKHET";
  std::string why;
  uint64_t bytes = strides_of(shape, why)->block_bytes;
  if (shape.order.front() == 'L' && pick(4) == 0) {
    shape.page_bytes = bytes / layers.size() + pick(20);
    bytes = shape.page_bytes * layers.size();
  }
  for (uint64_t left = pick(3) == 0 ? bytes : 0; left != 0; left -= shape.segments.back())
    shape.segments.push_back(std::min(left, 1 + pick(bytes)));
  return shape;
}

// One byte of the logical KV: a mix of where it belongs.
uint8_t truth(uint64_t layer, uint64_t plane, uint64_t head, uint64_t token, uint64_t at) {
  return static_cast<uint8_t>((layer * 7919 + plane * 104'729 + head * 1299709 + token * 15'485'863 +
                               at * 31) * 2654435761u >> 13);
}

template <class Visit>
void each_byte(const PartShape& shape, const Places& places, size_t blocks, Visit visit) {
  for (size_t block = 0; block < blocks; ++block)
    for (const auto& [c, place] : places)
      for (uint64_t b = 0; b < shape.element_bytes; ++b)
        visit(block, place + b,
              truth(c[kLayer] + shape.layers.first, c[kPlane], c[kHead] + shape.heads.first,
                    c[kToken] + block * shape.tokens, c[kElement] * shape.element_bytes + b));
}

void copies_put_every_byte_where_a_walk_of_the_order_finds_it() {
  constexpr std::array<std::array<uint64_t, 2>, 6> kTokens{{{4, 4}, {2, 4}, {6, 2}, {1, 3}, {8, 1}, {2, 8}}};
  for (int round = 0; round < 400; ++round) {
    const auto [from_tokens, to_tokens] = kTokens[pick(kTokens.size())];
    const std::array<uint64_t, 2> elements{1 + pick(5), pick(3) == 0 ? 0 : 1 + pick(5)};
    const uint64_t bytes = uint64_t{1} << pick(3);
    const Extent layers{pick(3), 3 + pick(3)}, heads{pick(2), 2 + pick(3)};
    const PartShape target = random_shape({1, 1 + 1 + pick(2)}, {1, 2}, to_tokens, elements, bytes);
    std::vector<PartShape> sources;
    // Two that have a part of it each, and one that has all: whoever is first is read.
    sources.push_back(random_shape({0, 2}, {0, 3}, from_tokens, elements, bytes));
    sources.push_back(random_shape({2, 4}, {1, 2}, from_tokens, elements, bytes));
    sources.push_back(random_shape({0, layers.end}, {0, heads.end}, from_tokens, elements, bytes));
    std::string why;
    const auto plan = CopyPlan::build(sources, target, why);
    CHECK(plan);
    const size_t skipped = pick(plan->to_blocks()), count = 1 + pick(4);
    const size_t blocks = plan->from_count(skipped, count);
    std::vector<size_t> from_indices(blocks), to_indices(count);
    for (size_t i = 0; i < blocks; ++i) from_indices[i] = blocks - 1 - i;
    for (size_t i = 0; i < count; ++i) to_indices[i] = count - 1 - i;
    std::vector<Blocks> memory;
    for (const PartShape& source : sources) {
      memory.emplace_back(source, blocks);
      each_byte(source, Walk(source).places, blocks, [&](size_t block, uint64_t at, uint8_t value) {
        memory.back().byte(from_indices[block], at) = value;
      });
    }
    Blocks into(target, count);
    std::vector<SourceBlocks> from;
    for (const Blocks& each : memory) from.push_back({each.segments, from_indices});
    CHECK(plan->complaint(from, into.segments, skipped, count).empty());
    plan->run(from, into.segments, to_indices, skipped);
    const size_t end = skipped + count;
    each_byte(target, Walk(target).places, end, [&](size_t block, uint64_t at, uint8_t value) {
      if (block >= skipped) CHECK(into.byte(to_indices[block - skipped], at) == value);
    });
  }
}

PartShape plain(Extent layers, Extent heads, uint64_t tokens = 16) {
  return {layers, heads, tokens, {8, 8}, 2, "LKHTE", 0, {}};
}

std::string refusal(const std::vector<PartShape>& sources, const PartShape& target) {
  std::string why;
  CHECK(!CopyPlan::build(sources, target, why));
  CHECK(!why.empty());
  return why;
}

void equal_shapes_are_one_run() {
  std::string why;
  for (const char* order : kOrders) {
    PartShape shape = plain({0, 4}, {0, 3});
    shape.order = order;
    const auto plan = CopyPlan::build({shape}, shape, why);
    CHECK(plan && plan->pieces().size() == 1 && plan->runs() == 1);
    CHECK(plan->least_run_bytes() == strides_of(shape, why)->block_bytes);
  }
  const auto halved = CopyPlan::build({plain({0, 4}, {0, 4})}, plain({0, 4}, {2, 4}), why);
  CHECK(halved && halved->pieces().size() == 1 && halved->runs() == 8);
}

void numbers_that_overflow_are_refused_at_once() {
  const uint64_t huge = uint64_t{1} << 63;
  std::vector<PartShape> hostile(12, plain({0, 4}, {0, 4}));
  hostile[0].layers = {0, huge};
  hostile[1].heads = {0, UINT64_MAX};
  hostile[2].tokens = huge;
  hostile[3].elements = {huge, huge};
  hostile[4].element_bytes = UINT64_MAX;
  hostile[5].page_bytes = UINT64_MAX / 4;
  hostile[6].segments = {UINT64_MAX, 1, 4 * 2 * 4 * 16 * 8 * 2};
  hostile[7].layers = {4, 4};
  hostile[8].heads = {3, 1};
  hostile[9].order = std::string("LKHT\0", 5);
  hostile[10].order = std::string(1000, 'L');
  hostile[11].segments.assign(kMaxSegments + 1, 1);
  for (const PartShape& shape : hostile) {
    refusal({shape}, plain({0, 4}, {0, 4}));
    refusal({plain({0, 4}, {0, 4})}, shape);
  }
}

void what_would_take_too_many_pieces_is_refused_soon() {
  const auto begun = std::chrono::steady_clock::now();
  PartShape shredded = plain({0, 64}, {0, 64}, 64);
  std::string why;
  const uint64_t bytes = strides_of(shredded, why)->block_bytes;
  shredded.segments.assign(kMaxSegments, bytes / kMaxSegments);
  PartShape turned = shredded;
  turned.order = "TEHKL";
  CHECK(refusal({shredded}, turned).find("too many") != std::string::npos);
  CHECK(refusal({plain({0, 4}, {0, 4}, 1)}, plain({0, 4}, {0, 4}, 1 << 20)).find("too many") !=
        std::string::npos);
  std::vector<PartShape> many;
  for (uint64_t i = 0; i < kMaxSources; ++i) many.push_back(plain({2 * i, 2 * i + 1}, {2 * i, 2 * i + 1}));
  refusal(many, plain({0, 1 << 13}, {0, 1 << 13}));
  many.push_back(plain({0, 1}, {0, 1}));
  refusal(many, plain({0, 1}, {0, 1}));
  // Sanitizers make it some ten times slower; without bounds it would be hours.
  CHECK(std::chrono::steady_clock::now() - begun < std::chrono::seconds(60));
}

void what_does_not_fit_together_is_refused_with_the_reason() {
  CHECK(refusal({plain({0, 4}, {0, 2})}, plain({0, 4}, {0, 4})) ==
        "no stored part has layers 0..4 of KV heads 2..4");
  CHECK(refusal({}, plain({0, 4}, {0, 4})) == "no stored part has layers 0..4 of KV heads 0..4");
  CHECK(refusal({plain({0, 4}, {0, 4}, 12)}, plain({0, 4}, {0, 4}, 8)).find("multiple") !=
        std::string::npos);
  PartShape wider = plain({0, 4}, {0, 4});
  wider.elements = {16, 8};
  CHECK(refusal({wider}, plain({0, 4}, {0, 4})).find("differ in size") != std::string::npos);
}

void a_plan_is_not_run_on_other_memory_than_it_was_made_for() {
  std::string why;
  const auto plan = CopyPlan::build({plain({0, 2}, {0, 2}, 8)}, plain({0, 2}, {0, 2}, 16), why);
  CHECK(plan && plan->from_blocks() == 2 && plan->to_blocks() == 1);
  const Blocks from(plain({0, 2}, {0, 2}, 8), 4), to(plain({0, 2}, {0, 2}, 16), 2);
  const std::vector<size_t> four{0, 1, 2, 3}, three{0, 1, 2};
  CHECK(plan->complaint({{from.segments, four}}, to.segments, 0, 2).empty());
  CHECK(!plan->complaint({{from.segments, three}}, to.segments, 0, 2).empty());
  CHECK(!plan->complaint({{to.segments, four}}, to.segments, 0, 2).empty());
  CHECK(!plan->complaint({{from.segments, four}}, from.segments, 0, 2).empty());
  CHECK(!plan->complaint({{from.segments, four}}, to.segments, 1, 2).empty());
  CHECK(!plan->complaint({{from.segments, four}}, to.segments, 0, SIZE_MAX).empty());
  CHECK(!plan->complaint({}, to.segments, 0, 2).empty());
}

// Long copies go past the caches, from and to any address.
void runs_are_copied_whole_whatever_their_length_and_place() {
  for (const uint64_t total : {uint64_t{0}, uint64_t{1} << 30})
    for (int round = 0; round < 200; ++round) {
      const uint64_t bytes = round < 80 ? 1 + static_cast<uint64_t>(round) : 64 + pick(5000);
      const uint64_t count = 1 + pick(9), to_stride = bytes + pick(40), from_stride = bytes + pick(70);
      const uint64_t to_at = pick(64), from_at = pick(64);
      std::vector<uint8_t> from(from_at + (count - 1) * from_stride + bytes);
      for (uint8_t& byte : from) byte = static_cast<uint8_t>(rng());
      std::vector<uint8_t> to(to_at + (count - 1) * to_stride + bytes, 0xAA), wanted = to;
      for (uint64_t i = 0; i < count; ++i)
        std::copy_n(from.begin() + static_cast<long>(from_at + i * from_stride), bytes,
                    wanted.begin() + static_cast<long>(to_at + i * to_stride));
      {
        const RunCopy copy(total, bytes);
        copy(to.data() + to_at, from.data() + from_at, bytes, count, to_stride, from_stride);
      }
      CHECK(to == wanted);
    }
}

}  // namespace

int main() {
  copies_put_every_byte_where_a_walk_of_the_order_finds_it();
  equal_shapes_are_one_run();
  numbers_that_overflow_are_refused_at_once();
  what_would_take_too_many_pieces_is_refused_soon();
  what_does_not_fit_together_is_refused_with_the_reason();
  a_plan_is_not_run_on_other_memory_than_it_was_made_for();
  runs_are_copied_whole_whatever_their_length_and_place();
}
