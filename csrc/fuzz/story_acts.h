// What can happen in a fuzzed story, what all of them share, and what must be left at the end of each.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string_view>
#include <vector>

#include "memory/directory.h"
#include "memory/pool.h"
#include "node/node.h"
#include "story_names.h"

namespace kv::fuzz {

// What the bytes choose; a step is one of these and then its arguments.
enum class Act : uint8_t {
  kConnect, kRegister, kPut, kReserve, kSettle, kAcquire, kRelease, kGet, kWait, kCancel, kMatch,
  kDelete, kPurge, kTell, kDeliver, kRead, kVanish, kLift, kScribble, kTime, kDrain, kRaw,
  kLend, kPost, kAttach, kHost, kCount
};
inline constexpr uint8_t kBend = 0x80;  // set in a step: one byte of its request is changed

inline void expect_zero(const Node& node, const std::vector<std::string_view>& gauges) {
  size_t seen = 0;
  for (const auto& [name, value] : node.stats()) {
    if (std::find(gauges.begin(), gauges.end(), name) == gauges.end()) continue;
    if (value != 0) std::fprintf(stderr, "%s is %zu\n", name.c_str(), size_t{value});
    expect(value == 0);
    ++seen;
  }
  expect(seen == gauges.size());
}

// Ends what gone clients have left, and forgets all blocks.
inline void forget_all(Node& node) {
  Purge purge = node.begin_purge();
  for (bool done = false; !done || !node.is_clear();) {
    node.begin_turn();
    node.clear_up();
    done = purge.go_on();
  }
}

// Zero when all clients are gone and the blocks are purged.
inline const std::vector<std::string_view> kLeftAtTheEnd{
    "connections", "reserved_blocks", "pinned_blocks", "leases",       "leased_blocks",
    "waits",       "used_bytes",      "blocks",        "fenced_blocks", "lent_bytes",
    "queue_pairs",   "fenced_bytes"};

// The read end of a pipe that is never closed: a fence, or any descriptor.
inline int pipe_end() {
  static int ends[2] = {-1, -1};
  if (ends[0] < 0) expect(pipe2(ends, O_CLOEXEC) == 0);
  return ends[0];
}

// One for all stories: no client of an earlier one uses it any more.
inline const Pool& empty_directory() {
  static Pool directory("fuzz-directory");
  if (directory.data() == nullptr) expect(directory.open(directory_bytes(1), false) == 0);
  std::memset(directory.data(), 0, directory.size());
  return directory;
}

}  // namespace kv::fuzz
