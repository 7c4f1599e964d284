// The protocol between kvstore clients and a store node. This header is its specification, together
// with the bodies of requests (wire/requests.h) and replies (wire/replies.h).
//
// TRANSPORT. A byte stream: a Unix socket, or TCP. A server with a certificate speaks only TLS 1.3
// on its TCP port; it answers a HELLO without TLS in plain text, with BAD_REQUEST, and ends the
// connection. A connection may end without TLS's close_notify: frames say whether they are whole.
//
// FRAMES. All integers are little-endian. Every request and every reply is one frame:
//
//     header (32 bytes) | body (body_bytes) | payload (payload_bytes)
//
//     offset  0  u32 magic          "KVR1"
//             4  u8  version        kVersion
//             5  u8  op             Op; a reply has that of its request
//             6  u16 status         Status; 0 in a request
//             8  u64 request_id     chosen by the client; the reply has the same
//            16  u32 body_bytes     <= max_body_bytes(op) in a request, <= kMaxBodyBytes in a reply
//            20  u32 reserved       0
//            24  u64 payload_bytes  0 except in a PUT request and a GET reply
//
// A body consists of the fields of its struct, in the order of the struct's `fields` function:
//     u8 u16 u32 u64     integers                    digest      32 raw bytes
//     text               u16 length, UTF-8           blob        u32 length, bytes
//     list of X          u32 count, then count X     hashes      list of digest
// Zero bytes follow, as few as make header and body a multiple of 64 bytes: kernels copy a payload
// at half the speed if it does not begin on a cache line.
//
// ORDER. Each request has one reply. Replies may come in another order than the requests. The
// server serves a request of many blocks in turns with the requests of other connections: it finds,
// leases or removes block by block, not all at once.
//
// HANDSHAKE. The first request of a connection is HELLO, soon after the connection was made: the
// server may end one without a HELLO to make room for another. It refuses any other first request.
//
// VERSIONS. A server accepts frames of its own version only. It answers another version with
// UNSUPPORTED_VERSION. An op that it does not know ends the connection with BAD_REQUEST.
//
// ERRORS. A reply whose status is not OK has an ErrorReply as its body. Exception: the reply to a
// WAIT with TIMEOUT or CANCELLED has a WaitReply. These errors end the connection:
//   - BAD_REQUEST and UNSUPPORTED_VERSION: the header breaks the rules above, the body does not
//     parse to its last byte, or a field is out of range;
//   - any error in reply to a PUT: its payload is on the way and is not read;
//   - UNAUTHORIZED, and any error in reply to a HELLO.
// After any other error the connection goes on.
//
// LIMITS OF TRUST. The server checks a header before it keeps a byte of the body. Its memory for a
// body grows with the bytes that have come, never with the announced length. It checks each count
// in a body against the bytes left before it allocates anything.
//
// TOKENS. A server with tokens accepts a HELLO with one of them only. It answers a missing and a
// wrong token alike, with UNAUTHORIZED. A server without tokens ignores the field. Without TLS,
// tokens travel in plain text.
//
// TENANTS. The token tells the tenant. A tenant sees only its own manifests (others are
// UNKNOWN_MANIFEST), blocks and ids: the same spec and hashes of two tenants name different blocks.
// MANIFESTS and PURGE concern its own only; STATS has the node's figures and its own. A server of
// several tenants gives no client access to its pool, and limits each tenant (table/quotas.h,
// table/tenants.h): beyond a limit the answer is LIMIT, for a block of a PUT NO_SPACE, for a WAIT
// that landed lease 0.
//
// DIGESTS. The digest of a part is the CRC32C of its bytes. The server's setting is on or off; the
// client learns it from the reply to its HELLO: kDigestsOff in `access` means off.
//   - On: the client computes the CRC32C of each part that it puts. The server stores it beside the
//     bytes and sends it wherever the bytes go. It checks the payload of a PUT before the block can
//     be found. The reader of a part checks it.
//   - Off: no digest is computed or checked. Where one would stand (PUT, COMMIT, posts, the
//     directory, replies) stands any number.
// With digests off, the server refuses a HELLO with neither kDigestsAsTold nor kNoDigests
// (NOT_ALLOWED): that client would take every part for corrupt.
// A client sends kDigestsAsTold. Earlier versions sent other flags: kVouch has no effect any more.
// kNoDigests: the client sends and checks none; with digests on, the server computes the CRC32C of
// what it receives and stores that.
//
// PAYLOADS. PUT: for each block of `hashes` the part's bytes, then 64 bytes that begin with their
// CRC32C (u32; the rest is 0 and ignored), also for blocks that turn out to exist. GET: the bytes
// of the leading run of blocks, whose CRC32Cs are in the body of the reply.
//
// RESERVATIONS. A client has a limited number of bytes reserved, lent and fenced; beyond that the
// answer is NO_SPACE, or fewer lent slots. If a connection is silent for a while its reservations
// expire: others may write these blocks, and its COMMIT is answered with GONE. The slot stays the
// connection's until its COMMIT, its ABORT, or its end.
//
// SHARED MEMORY. A HELLO with kWantPool over a Unix socket is answered with the pool's memfd
// (SCM_RIGHTS, with the first byte of the reply), opened read-only, or read-write with kWantWrite.
// A HELLO with kWantWrite brings the read end of a pipe (SCM_RIGHTS, with its first byte): the
// FENCE. The client closes the write end only after it has unmapped the pool; when the process
// dies, the kernel does so after the memory map is gone. Slots that the client of an ended
// connection may still be writing stay out of use until the write end is closed.
//
// DIRECTORY. If directory_bytes is not 0, two more descriptors come with the pool: the DIRECTORY
// (memory/directory.h), read-only, in which the server publishes where each part is; and the NOTES
// of this connection (memory/notes.h), read-write: a log of uses, a board of pins, a ring of posts.
// A client may read without a request: it looks the part up and copies it; the bytes are the part's
// only if the version of the entry is unchanged afterwards. To read in place it pins the slot, then
// checks that the version is unchanged. It logs what it has read. It sends a request for what it
// does not find.
//
// POSTS. A client with a writable pool and a directory may put without a request. The server lends
// it slots (LEND). The client copies a part into one of them and posts it in its notes
// (memory/put_ring.h); the slot is the server's from then on. The server takes all posts before it
// handles any request, so that a posted part is found. A post of a part that exists, or that breaks
// a rule, is dropped and counted. A post of a part that another client has reserved takes its
// place: the part is whole; the COMMIT or ABORT of the other ends its reservation. Lent slots have
// one size at a time: a LEND for another size returns all slots that the client has. While it
// copies, the client says so in the ring: the connection is not idle then.
//
// RDMA. A connection that maps nothing may ATTACH. The client and the server's host each make one
// end of a reliable RDMA connection and exchange cards, which the server passes on unread
// (store/kvrouter_store/rdma/base.py). From then on the client may RESERVE, and ACQUIRE tells it
// where the bytes are: it writes reserved slots and reads leased ones itself. It sends a COMMIT
// only after all its writes were acknowledged, and an ABORT only for slots that it never wrote or
// whose writes were acknowledged; otherwise it ends the connection. The slots that it had then stay
// out of use until the host has ended its end. `rail` selects one of several devices. The answer is
// LIMIT if the host has as many ends as it may, NOT_ALLOWED if it has none, or if the server has
// several tenants.
//
// PLACEMENT. `page_bytes` in the reply to a HELLO is the size of the pool's pages. A client that
// maps the pool at a multiple of it, and advises huge pages if it is larger than the system's page,
// keeps them whole. The server looks first in the memory of the NUMA node that a client on its host
// names, for slots that this client writes.
//
// DRAINING. A server that is about to stop accepts no connection. It ends each one as soon as
// nothing of it is in flight: no request or reply, no reservation or post, no lease. When no
// connection writes any more it answers WAITs with TIMEOUT, since nothing can land.
#pragma once

#include <bit>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace kv::wire {

static_assert(std::endian::native == std::endian::little, "only little-endian processors");

inline constexpr uint32_t kMagic = 0x3152564B;  // "KVR1"
inline constexpr uint8_t kVersion = 3;
inline constexpr size_t kHeaderBytes = 32;
inline constexpr size_t kHashBytes = 32;
inline constexpr size_t kLineBytes = 64;
inline constexpr uint32_t kMaxBodyBytes = 4u << 20;
inline constexpr uint32_t kMaxDocBytes = 64u << 10;
inline constexpr uint32_t kMaxTextBytes = 1024;
inline constexpr uint32_t kMaxTokenBytes = 512;
inline constexpr uint32_t kMaxCardBytes = 1024;
inline constexpr uint32_t kMaxHashes = 16384;  // blocks in one request
inline constexpr uint32_t kMaxParts = 1024;    // parts of one manifest
inline constexpr uint32_t kMaxSlots = 131072;  // blocks x parts in one ACQUIRE
inline constexpr uint32_t kMaxDeadlineMs = 3600u * 1000;
inline constexpr uint16_t kAllParts = 0xFFFF;
inline constexpr uint32_t kNoNumaNode = 0xFFFFFFFF;

enum class Op : uint8_t {
  kHello = 1,      // handshake: the client's name and token; the server's properties, its pool
  kRegister = 2,   // an engine registers a manifest with its spec and parts
  kManifests = 3,  // what is registered, with the engines
  kMatch = 4,      // the longest leading run of blocks that have all parts
  kReserve = 5,    // get slots to write one part of several blocks into (shared memory, RDMA)
  kCommit = 6,     // make reserved parts visible
  kAbort = 7,      // return reserved slots, which the client does not write any more
  kPut = 8,        // reserve, send and commit in one request
  kAcquire = 9,    // match, and lease the blocks that matched
  kRelease = 10,   // end a lease
  kGet = 11,       // the bytes of one part of a leading run of blocks
  kWait = 12,      // answered when the first `upto` blocks have landed, or at the deadline
  kCancel = 13,    // end a WAIT
  kDelete = 14,    // forget blocks
  kPurge = 15,     // forget all blocks of the tenant
  kStats = 16,     // gauges and counters
  kLend = 17,      // get slots for parts that are then posted (shared memory)
  kAttach = 18,    // an RDMA connection beside this one
  kHeld = 19,      // which of several blocks have all parts; earlier nodes hang up
};

enum class Status : uint16_t {
  kOk = 0,
  kBadRequest = 1,
  kUnsupportedVersion = 2,
  kUnknownManifest = 3,  // not registered with this server (it may have restarted)
  kLimit = 4,            // beyond a limit of the server; nothing was done
  kNotAllowed = 5,       // e.g. RESERVE without a writable pool
  kConflict = 6,         // REGISTER: the same digest is registered with other contents
  kTimeout = 7,          // WAIT: at its deadline, or what had landed went before the reply
  kCancelled = 8,        // WAIT: by CANCEL
  kUnauthorized = 9,     // HELLO: no token, or a wrong one
};

// The outcome for one block of a request.
enum class BlockStatus : uint8_t {
  kOk = 0,       // COMMIT: visible. ABORT: freed. Reader: read and checked.
  kGranted = 1,  // RESERVE: the slot is the client's until COMMIT or ABORT
  kStored = 2,   // PUT: visible
  kExists = 3,   // RESERVE, PUT: committed already. HELD: has all parts.
  kBusy = 4,     // RESERVE, PUT: reserved by another connection
  kNoSpace = 5,  // RESERVE, PUT: no slot, even after eviction; or the client has reached its limit
  kCorrupt = 6,  // PUT: the bytes do not match their CRC32C, and are not stored. Reader: the same.
  kGone = 7,     // COMMIT, ABORT: this connection has no such reservation (any more)
  kMissing = 8,  // HELD, and in clients: not in the store
};
inline constexpr uint8_t kLastBlockStatus = 8;

enum HelloFlags : uint32_t {
  kWantPool = 1,
  kWantWrite = 2,
  kVouch = 4,      // of earlier versions; no effect
  kNoDigests = 8,  // of earlier versions
  kDigestsAsTold = 16,
};
enum class PoolAccess : uint8_t { kNone = 0, kRead = 1, kWrite = 2 };
inline constexpr uint8_t kDigestsOff = 0x80;  // beside the access, in reply to kDigestsAsTold

struct Hash {
  uint8_t bytes[kHashBytes];
  auto operator<=>(const Hash&) const = default;
};
static_assert(sizeof(Hash) == kHashBytes && alignof(Hash) == 1);

// Hashes in memory that it does not own: a frame body, a caller's buffer.
struct HashSpan {
  const Hash* data = nullptr;
  uint32_t count = 0;
  const Hash& operator[](size_t i) const { return data[i]; }
};

struct Header {
  Op op{};
  Status status = Status::kOk;
  uint64_t request_id = 0;
  uint32_t body_bytes = 0;
  uint64_t payload_bytes = 0;
};

// The length of a PUT's payload.
constexpr uint64_t put_payload_bytes(uint64_t block_bytes, uint64_t blocks) {
  return (block_bytes + kLineBytes) * blocks;
}

// The limit for the body of a request, with room for a few integers and the padding.
constexpr uint32_t max_body_bytes(Op op) {
  constexpr uint32_t rest = 64 + kLineBytes;
  constexpr uint32_t hashes = kMaxHashes * kHashBytes + rest;
  switch (op) {
    case Op::kHello: return kMaxTextBytes + kMaxTokenBytes + rest;
    case Op::kRegister: return kMaxDocBytes + kMaxParts * 40 + 2 * kMaxTextBytes + 64 + rest;
    case Op::kMatch:
    case Op::kHeld:
    case Op::kDelete:
    case Op::kReserve:
    case Op::kPut:
    case Op::kAcquire:
    case Op::kGet:
    case Op::kWait: return hashes;
    case Op::kCommit:
    case Op::kAbort: return hashes + kMaxHashes * 8;
    case Op::kAttach: return kMaxCardBytes + rest;
    default: return rest;
  }
}

}  // namespace kv::wire

// The bodies. `fields(visitor)` names the fields in wire order, for the encoder and the decoder
// alike. Views (HashSpan, string_view) point into the decoded buffer.
#include "wire/replies.h"   // IWYU pragma: export
#include "wire/requests.h"  // IWYU pragma: export
