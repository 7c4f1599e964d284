// Valid frames for fuzzers to start from.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "wire/codec.h"

namespace kv::fuzz {

using namespace wire;

inline constexpr uint64_t kPartBytes = 40;

inline constexpr const char* kToken = "a token of the fuzzed node";

inline Hash hash_of(uint8_t i) {
  Hash hash{};
  hash.bytes[0] = i;
  return hash;
}

template <class Body>
std::string frame(Op op, Body body, Status status = Status::kOk, uint64_t payload_bytes = 0) {
  return encode_frame(op, status, 7, body, payload_bytes);
}

// A conversation in which every request has something to do.
inline std::vector<std::string> requests() {
  static const std::vector<Hash> hashes{hash_of(1), hash_of(2), hash_of(3)};
  const HashSpan span{hashes.data(), 3};
  RegisterRequest manifest{hash_of(9), hash_of(8), "engine", "", "doc", {{hash_of(7), kPartBytes}}};
  RegisterRequest refusal{hash_of(9), hash_of(8), "engine", "why", "", {}};
  const uint64_t payload_bytes = put_payload_bytes(kPartBytes, 3);
  return {
      frame(Op::kHello, HelloRequest{kDigestsAsTold, "fuzz", kToken, 1}),
      frame(Op::kRegister, manifest),
      frame(Op::kRegister, refusal),
      frame(Op::kManifests, ManifestsRequest{0}),
      frame(Op::kWait, WaitRequest{1, 3, 5000, 1, span}),
      frame(Op::kCancel, CancelRequest{7}),
      frame(Op::kPut, WriteRequest{1, 0, {}, span}, Status::kOk, payload_bytes) +
          std::string(payload_bytes, '\0'),
      frame(Op::kReserve, WriteRequest{1, 0, hash_of(3), {hashes.data(), 2}}),
      frame(Op::kCommit, CommitRequest{1, 0, span, {1, 1, 1}, {0, 0, 0}}),
      frame(Op::kAbort, AbortRequest{1, 0, span, {1, 1, 1}}),
      frame(Op::kMatch, MatchRequest{1, 1, span}),
      frame(Op::kAcquire, ReadRequest{1, kAllParts, span}),
      frame(Op::kRelease, ReleaseRequest{1}),
      frame(Op::kGet, ReadRequest{1, 0, span}),
      frame(Op::kDelete, BlocksRequest{1, {hashes.data(), 1}}),
      frame(Op::kPurge, EmptyRequest{}),
      frame(Op::kStats, EmptyRequest{}),
      frame(Op::kLend, LendRequest{1, 0, hash_of(3)}),
      frame(Op::kAttach, AttachRequest{1, "a card of some length"}),
      frame(Op::kHeld, BlocksRequest{1, span}),
  };
}

inline std::vector<std::string> replies() {
  ManifestInfo info{1, 1, hash_of(8), "doc", {{"a"}, {"b"}}, {1, 2}};
  return {
      frame(Op::kHello, HelloReply{1, 2, 3, 4096, 0, 2, 4096, "/run/kv.sock", "boot", 4096}),
      frame(Op::kHello, HelloReply{1, 2, 3, 4096, 0, kDigestsOff | 2, 4096, "", "boot", 4096}),
      frame(Op::kRegister, RegisterReply{1, 1, {1, 2, 3}}),
      frame(Op::kManifests, ManifestsReply{1, {info, info}, {{"engine", "why"}}}),
      frame(Op::kMatch, MatchReply{3, {{3, 0, 0}, {2, 1, 1}}}),
      frame(Op::kReserve, ReserveReply{{1, 3}, {4096, 0}, {7, 0}}),
      frame(Op::kPut, StatusesReply{{2, 2, 5}}),
      frame(Op::kAcquire, AcquireReply{1, 2, {64}, {0, 4096}, {1, 1}, {5, 6}}),
      frame(Op::kRelease, FlagReply{1}),
      frame(Op::kGet, GetReply{64, {1, 2, 3}}, Status::kOk, 192),
      frame(Op::kWait, WaitReply{3, 1}),
      frame(Op::kWait, WaitReply{1, 0}, Status::kTimeout),
      frame(Op::kPurge, CountReply{4}),
      frame(Op::kStats, StatsReply{{{"blocks", 1}, {"leases", 2}}}),
      frame(Op::kLend, LendReply{2, {4096, 8192}, {1, 2}}),
      frame(Op::kAttach, AttachReply{"a card of some length"}),
      frame(Op::kMatch, ErrorReply{"no such manifest"}, Status::kUnknownManifest),
  };
}

}  // namespace kv::fuzz

// Each fuzz target names what its inputs look like; the standalone driver mutates them.
std::vector<std::string> fuzz_seeds();
