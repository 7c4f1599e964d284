// The bodies of requests; a part of the protocol's specification (wire/wire.h).
#pragma once

#include "wire/wire.h"

namespace kv::wire {

struct HelloRequest {
  uint32_t flags = 0;  // HelloFlags
  std::string_view name;
  std::string_view token{};          // blob <= kMaxTokenBytes: opaque, never logged; "" without one
  uint32_t numa_node = kNoNumaNode;  // of the memory that the client copies from
  template <class V> bool fields(V& v) {
    return v.u32(flags) && v.text(name) && v.blob(token, kMaxTokenBytes) && v.u32(numa_node);
  }
};

struct PartSpec {
  Hash digest{};
  uint64_t bytes = 0;  // of one block's part
  template <class V> bool fields(V& v) { return v.digest(digest) && v.u64(bytes); }
};

// With a refusal (a reason) the engine does not share its blocks: it is counted and listed, the
// rest is ignored, and the ids in the reply are 0.
struct RegisterRequest {
  Hash spec{};
  Hash manifest{};
  std::string_view engine;
  std::string_view refusal;
  std::string_view doc;  // blob <= kMaxDocBytes, opaque to the server
  std::vector<PartSpec> parts;
  template <class V> bool fields(V& v) {
    return v.digest(spec) && v.digest(manifest) && v.text(engine) && v.text(refusal) &&
           v.blob(doc, kMaxDocBytes) && v.list(parts, kMaxParts, 40);
  }
};

struct ManifestsRequest {
  uint32_t after = 0;  // only manifests with a greater id: the last id of the page before
  template <class V> bool fields(V& v) { return v.u32(after); }
};

// With `promote`, blocks on slower tiers are brought into memory in the order of the chain, for a
// client that is about to read them. The reply does not wait for it.
struct MatchRequest {
  uint32_t manifest_id = 0;
  uint8_t promote = 0;
  HashSpan hashes;
  template <class V> bool fields(V& v) {
    return v.u32(manifest_id) && v.u8(promote) && v.hashes(hashes);
  }
};

// DELETE, HELD.
struct BlocksRequest {
  uint32_t manifest_id = 0;
  HashSpan hashes;
  template <class V> bool fields(V& v) { return v.u32(manifest_id) && v.hashes(hashes); }
};

// RESERVE, PUT. `parent` is the hash before hashes[0], or zeros if hashes[0] begins a chain.
struct WriteRequest {
  uint32_t manifest_id = 0;
  uint16_t part = 0;  // index into the manifest's parts
  Hash parent{};
  HashSpan hashes;
  template <class V> bool fields(V& v) {
    return v.u32(manifest_id) && v.u16(part) && v.digest(parent) && v.hashes(hashes);
  }
};

// `parent`: the block before the first that is to be put; it is not evicted for the lent slots.
struct LendRequest {
  uint32_t manifest_id = 0;
  uint16_t part = 0;
  Hash parent{};
  template <class V> bool fields(V& v) {
    return v.u32(manifest_id) && v.u16(part) && v.digest(parent);
  }
};

struct CommitRequest {
  uint32_t manifest_id = 0;
  uint16_t part = 0;
  HashSpan hashes;
  std::vector<uint32_t> generations;  // one per hash
  std::vector<uint32_t> crcs;         // CRC32C of the part's bytes, one per hash
  template <class V> bool fields(V& v) {
    return v.u32(manifest_id) && v.u16(part) && v.hashes(hashes) &&
           v.numbers(generations, kMaxHashes) && v.numbers(crcs, kMaxHashes);
  }
};

struct AbortRequest {
  uint32_t manifest_id = 0;
  uint16_t part = 0;
  HashSpan hashes;
  std::vector<uint32_t> generations;
  template <class V> bool fields(V& v) {
    return v.u32(manifest_id) && v.u16(part) && v.hashes(hashes) &&
           v.numbers(generations, kMaxHashes);
  }
};

// ACQUIRE (part may be kAllParts), GET (it may not).
struct ReadRequest {
  uint32_t manifest_id = 0;
  uint16_t part = 0;
  HashSpan hashes;
  template <class V> bool fields(V& v) {
    return v.u32(manifest_id) && v.u16(part) && v.hashes(hashes);
  }
};

struct ReleaseRequest {
  uint64_t lease_id = 0;
  template <class V> bool fields(V& v) { return v.u64(lease_id); }
};

struct WaitRequest {
  uint32_t manifest_id = 0;
  uint32_t upto = 0;  // <= hashes
  uint32_t deadline_ms = 0;
  uint8_t lease = 0;  // 1: at the landing, take a lease on the first `upto` blocks
  HashSpan hashes;
  template <class V> bool fields(V& v) {
    return v.u32(manifest_id) && v.u32(upto) && v.u32(deadline_ms) && v.u8(lease) &&
           v.hashes(hashes);
  }
};

struct CancelRequest {
  uint64_t request_id = 0;  // of the WAIT
  template <class V> bool fields(V& v) { return v.u64(request_id); }
};

struct AttachRequest {
  uint32_t rail = 0;
  std::string_view card;  // blob <= kMaxCardBytes: the client's end, opaque to the server
  template <class V> bool fields(V& v) { return v.u32(rail) && v.blob(card, kMaxCardBytes); }
};

// PURGE, STATS.
struct EmptyRequest {
  template <class V> bool fields(V&) { return true; }
};

}  // namespace kv::wire
