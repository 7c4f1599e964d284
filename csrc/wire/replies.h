// The bodies of replies; a part of the protocol's specification (wire/wire.h).
#pragma once

#include "wire/wire.h"

namespace kv::wire {

struct HelloReply {
  uint64_t epoch = 0;  // random per server start: leases and ids are valid in one epoch only
  uint64_t session = 0;
  uint64_t pool_bytes = 0;
  uint32_t granule_bytes = 0;
  uint32_t node = 0;
  uint8_t access = 0;            // PoolAccess, with kDigestsOff; descriptors come unless kNone
  uint64_t directory_bytes = 0;  // 0: there is no directory
  std::string_view unix_path;    // "" if the server has no Unix socket
  std::string_view boot_id;      // of the server's kernel: equal to the client's on the same host
  uint64_t page_bytes = 0;       // of the pool's pages
  template <class V> bool fields(V& v) {
    return v.u64(epoch) && v.u64(session) && v.u64(pool_bytes) && v.u32(granule_bytes) &&
           v.u32(node) && v.u8(access) && v.u64(directory_bytes) && v.text(unix_path) &&
           v.text(boot_id) && v.u64(page_bytes);
  }
};

struct RegisterReply {
  uint32_t manifest_id = 0;
  uint32_t spec_id = 0;
  std::vector<uint32_t> part_ids;
  template <class V> bool fields(V& v) {
    return v.u32(manifest_id) && v.u32(spec_id) && v.numbers(part_ids, kMaxParts);
  }
};

struct Name {
  std::string_view text;
  template <class V> bool fields(V& v) { return v.text(text); }
};

struct ManifestInfo {
  uint32_t manifest_id = 0;
  uint32_t spec_id = 0;
  Hash digest{};
  std::string_view doc;
  std::vector<Name> engines;  // with a connection now
  std::vector<uint32_t> part_ids;
  template <class V> bool fields(V& v) {
    return v.u32(manifest_id) && v.u32(spec_id) && v.digest(digest) && v.blob(doc, kMaxDocBytes) &&
           v.list(engines, kMaxHashes, 2) && v.numbers(part_ids, kMaxParts);
  }
};

struct RefusalInfo {
  std::string_view engine;
  std::string_view reason;
  template <class V> bool fields(V& v) { return v.text(engine) && v.text(reason); }
};

struct ManifestsReply {
  uint8_t more = 0;  // 1: there is another page, after the last id
  std::vector<ManifestInfo> manifests;
  std::vector<RefusalInfo> refusals;  // of connections now; in the first page only
  template <class V> bool fields(V& v) {
    return v.u8(more) && v.list(manifests, kMaxHashes, 52) && v.list(refusals, kMaxHashes, 4);
  }
};

// The leading run that this tier and the faster ones have together.
struct Place {
  uint32_t blocks = 0;
  uint32_t node = 0;
  uint8_t tier = 0;  // 0 = memory, 1 = disk, 2 = remote: in a store below the node
  template <class V> bool fields(V& v) { return v.u32(blocks) && v.u32(node) && v.u8(tier); }
};

struct MatchReply {
  uint32_t blocks = 0;
  std::vector<Place> places;
  template <class V> bool fields(V& v) { return v.u32(blocks) && v.list(places, 1024, 9); }
};

struct ReserveReply {
  std::vector<uint8_t> statuses;      // BlockStatus
  std::vector<uint64_t> offsets;      // of the slot in the pool; 0 if not granted
  std::vector<uint32_t> generations;  // of the slot; for COMMIT and ABORT
  template <class V> bool fields(V& v) {
    return v.numbers(statuses, kMaxHashes) && v.numbers(offsets, kMaxHashes) &&
           v.numbers(generations, kMaxHashes);
  }
};

// All slots that the connection has now, the oldest first.
struct LendReply {
  uint32_t most = 0;  // the limit for slots of this size
  std::vector<uint64_t> offsets;
  std::vector<uint32_t> generations;
  template <class V> bool fields(V& v) {
    return v.u32(most) && v.numbers(offsets, kMaxHashes) && v.numbers(generations, kMaxHashes) &&
           offsets.size() == generations.size();
  }
};

// COMMIT, ABORT, PUT, HELD.
struct StatusesReply {
  std::vector<uint8_t> statuses;  // BlockStatus, one per hash
  template <class V> bool fields(V& v) { return v.numbers(statuses, kMaxHashes); }
};

// Slot k of block i is at i * part_bytes.size() + k of the three lists.
struct AcquireReply {
  uint64_t lease_id = 0;  // 0 if no block matched: nothing to release
  uint32_t blocks = 0;
  std::vector<uint64_t> part_bytes;
  std::vector<uint64_t> offsets;
  std::vector<uint32_t> generations;
  std::vector<uint32_t> crcs;
  template <class V> bool fields(V& v) {
    return v.u64(lease_id) && v.u32(blocks) && v.numbers(part_bytes, kMaxParts) &&
           v.numbers(offsets, kMaxSlots) && v.numbers(generations, kMaxSlots) &&
           v.numbers(crcs, kMaxSlots);
  }
};

struct GetReply {
  uint64_t part_bytes = 0;
  std::vector<uint32_t> crcs;  // one per block of the leading run, whose bytes are the payload
  template <class V> bool fields(V& v) { return v.u64(part_bytes) && v.numbers(crcs, kMaxHashes); }
};

struct WaitReply {
  uint32_t blocks = 0;    // the leading run now
  uint64_t lease_id = 0;  // 0 unless landed, wanted and within the tenant's limits
  template <class V> bool fields(V& v) { return v.u32(blocks) && v.u64(lease_id); }
};

// RELEASE: the lease existed. CANCEL: the WAIT was pending.
struct FlagReply {
  uint8_t flag = 0;
  template <class V> bool fields(V& v) { return v.u8(flag); }
};

// DELETE, PURGE: the number of blocks forgotten.
struct CountReply {
  uint64_t count = 0;
  template <class V> bool fields(V& v) { return v.u64(count); }
};

struct AttachReply {
  std::string_view card;  // blob <= kMaxCardBytes: the server's end, and where the pool is
  template <class V> bool fields(V& v) { return v.blob(card, kMaxCardBytes); }
};

// A gauge; or a counter, if the first word of the name ends in `_total`. `NAME.SERIES` is one
// series of NAME, and NAME is their sum. Times are in nanoseconds: NAME.le_BOUND is how many took
// at most BOUND
// (`inf`: all), NAME.sum their sum. Figures of tenants, tenant_NAME.TENANT, have no sum.
struct Stat {
  std::string_view name;
  uint64_t value = 0;
  template <class V> bool fields(V& v) { return v.text(name) && v.u64(value); }
};

struct StatsReply {
  std::vector<Stat> values;
  template <class V> bool fields(V& v) { return v.list(values, 4096, 10); }
};

struct ErrorReply {
  std::string_view message;
  template <class V> bool fields(V& v) { return v.text(message); }
};

}  // namespace kv::wire
