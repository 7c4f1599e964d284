// The counters of a node, and the list that reports them. Guarded by the node's mutex.
#pragma once

#include <array>
#include <numeric>
#include <string>

#include "wire/wire.h"

namespace kv {

enum class Transport : uint8_t { kShm, kUnix, kTcp, kRdma };
inline constexpr std::array<const char*, 4> kTransportNames{"shm", "unix", "tcp", "rdma"};

// How a WAIT ended; kGone: with its connection.
enum class Landing : uint8_t { kLanded, kTimeout, kCancelled, kGone };
inline constexpr std::array<const char*, 4> kLandingNames{"landed", "timeout", "cancelled", "gone"};

enum class Posted : uint8_t { kStored, kExists, kRefused };
inline constexpr std::array<const char*, 3> kPostedNames{"stored", "exists", "refused"};

// The outcome of an ATTACH; kGone: the connection ended before the answer.
enum class Attached : uint8_t { kDone, kRefused, kGone };
inline constexpr std::array<const char*, 3> kAttachedNames{"attached", "refused", "gone"};

// Where blocks are; the number is that of wire::Place.
// kRemote: in a store below this node, and not in it.
enum class Tier : uint8_t { kMemory, kDisk, kRemote };
inline constexpr std::array<const char*, 3> kTierNames{"memory", "disk", "remote"};

// By the number of the op, minus one.
inline constexpr std::array<const char*, 19> kOpNames{
    "hello",   "register", "manifests", "match",  "reserve", "commit", "abort", "put",  "acquire",
    "release", "get",      "wait",      "cancel", "delete",  "purge",  "stats", "lend", "attach",
    "held"};
static_assert(static_cast<size_t>(wire::Op::kHeld) == kOpNames.size());

// Times in nanoseconds, counted in buckets with these upper bounds and a last one without.
template <const auto& Bounds> class Histogram {
 public:
  void observe(uint64_t ns) {
    size_t at = 0;
    while (at < Bounds.size() && ns > Bounds[at]) ++at;
    ++counts_[at];
    sum_ns_ += ns;
  }
  const auto& counts() const { return counts_; }
  uint64_t sum_ns() const { return sum_ns_; }

 private:
  std::array<uint64_t, Bounds.size() + 1> counts_{};
  uint64_t sum_ns_ = 0;
};

inline constexpr std::array<uint64_t, 9> kOperationBounds{
    2'000, 5'000, 10'000, 50'000, 100'000, 500'000, 1'000'000, 10'000'000, 100'000'000};
inline constexpr std::array<uint64_t, 13> kLandingBounds{
    1'000'000,     5'000'000,      10'000'000,    25'000'000,    50'000'000,
    100'000'000,   250'000'000,    500'000'000,   1'000'000'000, 2'500'000'000,
    5'000'000'000, 10'000'000'000, 30'000'000'000};

template <class Of, size_t N> struct CountsBy {
  std::array<uint64_t, N> values{};
  uint64_t& operator[](Of which) { return values[static_cast<size_t>(which)]; }
};

// They only grow. They count blocks unless the name says otherwise.
struct Counters {
  uint64_t connections = 0, puts = 0, commits = 0, aborts = 0, corrupt = 0, no_space = 0;
  uint64_t deleted = 0, purged = 0;
  CountsBy<Tier, kTierNames.size()> hits, misses;         // of MATCH and ACQUIRE
  CountsBy<Transport, kTransportNames.size()> bytes_in;   // committed
  CountsBy<Transport, kTransportNames.size()> bytes_out;  // sent, or leased to readers of the pool
  CountsBy<Posted, kPostedNames.size()> posts;            // parts put without a request
  CountsBy<Attached, kAttachedNames.size()> attaches;
  uint64_t broken_attachments = 0;                   // ended during a put or get
  uint64_t refusals = 0;                             // engines that refused to share
  CountsBy<Landing, kLandingNames.size()> landings;  // waits that ended
  uint64_t bad_frames = 0;                           // connections ended for breaking the protocol
  uint64_t unauthorized = 0;    // HELLOs and HTTP requests without a valid token
  uint64_t tls_failures = 0;    // connections ended because TLS failed
  uint64_t stalled = 0;         // connections ended for making no progress
  uint64_t rejected = 0;        // connections ended because there were too many
  uint64_t fenced = 0;          // slots fenced because their connection ended
  uint64_t expired = 0;         // reservations of silent connections
  uint64_t client_limited = 0;  // blocks refused because their client held as much as it may
  Histogram<kLandingBounds> landing_waits;  // of those that landed
  std::array<Histogram<kOperationBounds>, kOpNames.size()> operations;

  Histogram<kOperationBounds>& operation(wire::Op op) {
    return operations[static_cast<size_t>(op) - 1];
  }
};

// Names and values, as specified at Stat in wire/replies.h.
class StatList {
 public:
  using Values = std::vector<std::pair<std::string, uint64_t>>;

  StatList& add(std::string name, uint64_t value) {
    values_.emplace_back(std::move(name), value);
    return *this;
  }
  // The sum, then each series.
  template <size_t N> StatList& add_each(const std::string& name,
                                         const std::array<const char*, N>& series,
                                         const std::array<uint64_t, N>& values) {
    add(name, std::accumulate(values.begin(), values.end(), uint64_t{0}));
    for (size_t i = 0; i < N; ++i) add(name + "." + series[i], values[i]);
    return *this;
  }
  // As Prometheus counts: each bucket holds what is in those below it.
  template <const auto& Bounds>
  StatList& add_times(const std::string& name, const Histogram<Bounds>& histogram) {
    uint64_t count = 0;
    for (size_t i = 0; i < Bounds.size(); ++i)
      add(name + ".le_" + std::to_string(Bounds[i]), count += histogram.counts()[i]);
    add(name + ".le_inf", count + histogram.counts().back());
    return add(name + ".sum", histogram.sum_ns());
  }
  Values take() { return std::move(values_); }

 private:
  Values values_;
};

}  // namespace kv
