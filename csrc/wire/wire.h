// The protocol between kvstore clients and a store node. This header is its specification.
//
// TRANSPORT. A byte stream: a Unix socket, or TCP, where a server with a certificate speaks TLS 1.3
// and nothing else. A HELLO that comes there without TLS is answered without it, with BAD_REQUEST,
// and ends the connection. The end of TLS without close_notify is like that of a socket: frames tell
// by themselves whether they are whole. All integers are little-endian. Every frame is
//
//     header (32 bytes) | body (body_bytes) | payload (payload_bytes)
//
//     offset  0  u32 magic          "KVR1"
//             4  u8  version        kVersion
//             5  u8  op             Op
//             6  u16 status         Status; 0 in a request
//             8  u64 request_id     chosen by the client; the reply carries it
//            16  u32 body_bytes     <= max_body_bytes(op) in a request, <= kMaxBodyBytes in a reply
//            20  u32 reserved       0
//            24  u64 payload_bytes  0 except in a PUT request and a GET reply
//
// One request has one reply. Replies may come in another order than the requests: WAIT is answered
// when the blocks land. A request of many blocks is served in turns with those of other connections,
// and what it finds, leases or removes it finds, leases or removes block by block. The first request
// of a connection is HELLO, soon after it was made: one without may be ended to make room for
// another. Anything else before the HELLO (which
// is refused by its header, before its body has come), a header that breaks the rules above, and a body that does not parse to its last byte are answered
// with BAD_REQUEST (or UNSUPPORTED_VERSION) and end the connection.
//
// VERIFICATION. The header is checked before a byte of the body is kept, body memory grows with the
// bytes that have come (never with the length that was announced), and each count in a body is
// checked against the bytes left before anything is allocated for it.
//
// DIGESTS. They are the server's setting: checked, or off. The client learns it from the reply to its
// HELLO: kDigestsOff in `access` means off.
// Checked: the client computes the CRC32C of each part that it puts. The server keeps it beside the
// bytes, and it goes wherever they go. The server checks what comes in a PUT before anybody can find
// it. Who reads a part checks it.
// Off: nobody computes a digest. Where one would stand (the lines of a PUT, COMMIT, posts, the
// DIRECTORY, replies) stands any number, and nobody looks at it. The server takes a HELLO only with
// kDigestsAsTold (the client does what the reply says) or with kNoDigests; another client would take
// every part for corrupt, and is answered with NOT_ALLOWED, which ends the connection.
// Clients of earlier versions say other things. kVouch asks the server not to check: it checks all
// the same. kNoDigests says that the lines of PUTs say nothing and that the client looks at no
// digest: the server then computes the CRC32C of what it receives, and keeps that.
//
// FIELDS of a body, in the order of the `fields` function of its struct in wire/requests.h and
// wire/replies.h:
//     u8 u16 u32 u64     integers                    digest      32 raw bytes
//     text               u16 length, UTF-8           blob        u32 length, bytes
//     list of X          u32 count, then count X     hashes      list of digest
// After the fields come as few zero bytes as make header and body fill whole lines of 64 bytes:
// kernels copy payloads at half speed from and to where no line begins.
//
// TOKENS. A server with tokens takes a HELLO only with one of them; without tokens it ignores what
// HELLO carries. A missing and a wrong token are answered alike, with UNAUTHORIZED, and end the
// connection. Under TLS they travel encrypted; without it the network is trusted with them.
//
// TENANTS. The token says whose connection it is. What a tenant registers, its blocks under the
// specs that it registered, and the ids of both are its own: another tenant's ids are unknown to it
// (UNKNOWN_MANIFEST), the same spec and hashes name other blocks, MANIFESTS and PURGE are of its
// own. STATS are the node's, and the tenant's own. A server of several tenants hands its pool to
// nobody, and bounds what each has at a time (table/quotas.h, table/tenant_limits.h): what would exceed it is
// answered with LIMIT, a block of a PUT with NO_SPACE, a WAIT that landed with lease 0.
//
// ERRORS. A reply whose status is not OK has one `text` as its body (ErrorReply), except the reply
// of WAIT: LANDED is OK, and TIMEOUT and CANCELLED carry a WaitReply too. Any error reply to a PUT
// ends the connection: its payload is on the way and will not be read.
//
// SHARED MEMORY. A HELLO with kWantPool over a Unix socket is answered with the pool's memfd
// (SCM_RIGHTS, with the first byte of the reply): re-opened read-only, or read-write with
// kWantWrite. A HELLO with kWantWrite carries the read end of a pipe along (SCM_RIGHTS, with its
// first byte): the FENCE. The client closes the write end only after it has unmapped the pool; when
// the process dies the kernel does so after its memory map is gone. Slots that a vanished
// connection might still be writing stay out of use until the fence's write end is closed.
//
// RESERVATIONS. What one client may have reserved, lent and fenced at a time is bounded in bytes; beyond
// that the answer is NO_SPACE, or fewer lent slots. The reservations of a connection that sends nothing
// for a while end: others may write these blocks, and its COMMIT is answered with GONE. Each slot stays
// the connection's until it asks for the COMMIT or the ABORT, or is gone as said above.
//
// DIRECTORY. With the pool come, if directory_bytes is not 0, two more descriptors: the DIRECTORY
// (memory/directory.h), read-only, where the server writes which part lies where, and the NOTES of this
// connection alone, read-write (memory/notes.h): a use log, a pin board, a ring of puts. A client may
// copy what it finds there without a request: it looks the part up, copies, and takes the bytes for
// the part's only if the entry's version is still what it was. To read in place, it pins the slot,
// and then looks whether the version still stands. What it used it notes in the log. What it does
// not find, it asks for.
//
// POSTS. A client with a writable pool and a directory may put without a request. The server lends it
// slots (LEND); the client copies a part into one of them and posts it in a ring in its notes
// (memory/put_ring.h), after which the slot is the server's. A part is found as soon as it was posted: the
// server takes what was posted before it looks at any request. What stands already, or breaks a
// rule, is dropped, and counted; where another writer has the part reserved, the posted one, which is
// whole, takes its place, and the COMMIT or ABORT of the other ends what it had. Lent slots have one
// size at a time: a LEND for another size gives those back that the client has. While it copies it says
// so in the ring: it is then not idle.
//
// ATTACHING. A connection that maps nothing may ATTACH: its client and the server's host each make one
// end of a reliable RDMA connection and tell each other about it, in cards that the server hands on
// as they are (store/kvrouter_store/rdma/base.py). From then on it may RESERVE, and ACQUIRE tells it where
// its bytes lie: the client writes reserved slots and reads leased ones itself. It asks for a COMMIT
// only when all its writes were acknowledged, and for an ABORT only of slots of which that is so, or
// which it never wrote: else it ends the connection. The slots that it then still had stay out of use
// until the host has ended its end of the RDMA connection. `rail` says which of several devices the
// client uses. Of several tenants nobody attaches; where the host has as many ends as it may, the
// answer is LIMIT, where there is none to be had, NOT_ALLOWED. A server that does not know the op
// ends the connection with BAD_REQUEST.
//
// PLACEMENT. `page_bytes` of a HELLO's reply is the size of the pages that the pool is made of: who
// maps the pool at a multiple of it, and advises huge pages where it exceeds the system's own, keeps
// them whole. The NUMA node that a client names is where the memory for what it writes is looked for
// first, if the client shares the server's host (a Unix socket says so); it promises nothing.
//
// LEAVING. A server that is about to stop accepts no connection, and ends each one as soon as nothing
// of it is under way: no request or reply, no reservation or post, no lease. When nobody writes any more it
// answers WAITs with TIMEOUT, since nothing can land.
//
// PAYLOADS. PUT: for each block of `hashes` the part's bytes and a line of 64 bytes that begins with
// their CRC32C (u32; the rest is 0 and not looked at), also for blocks that turn out to exist. GET: the
// bytes of the leading run of blocks, whose CRC32Cs are in the body of the reply.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace kv::wire {

static_assert(std::endian::native == std::endian::little, "kvcore is written for little-endian");

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
  kHello = 1,      // who the client is; what the server is; the pool's memfd
  kRegister = 2,   // a manifest, its spec and its parts, by an engine
  kManifests = 3,  // what is registered, and by whom
  kMatch = 4,      // the longest leading run of blocks whose parts are all committed
  kReserve = 5,    // slots to write one part of several blocks into (shared memory, RDMA)
  kCommit = 6,     // make reserved parts visible
  kAbort = 7,      // give reserved slots back; the client no longer writes them
  kPut = 8,        // reserve, send and commit in one request
  kAcquire = 9,    // match, and a lease on what matched
  kRelease = 10,   // end a lease
  kGet = 11,       // the bytes of one part of a leading run of blocks
  kWait = 12,      // answered when the first `upto` blocks have landed, or at the deadline
  kCancel = 13,    // end a WAIT
  kDelete = 14,    // forget blocks
  kPurge = 15,     // forget all blocks of the tenant
  kStats = 16,     // gauges and counters
  kLend = 17,      // slots for parts that are then posted (shared memory only)
  kAttach = 18,    // an RDMA connection beside this one
};

enum class Status : uint16_t {
  kOk = 0,
  kBadRequest = 1,
  kUnsupportedVersion = 2,
  kUnknownManifest = 3,  // not registered with this server (it may have restarted)
  kLimit = 4,            // a limit of the server; nothing was done
  kNotAllowed = 5,       // e.g. RESERVE by who can write no slot
  kConflict = 6,         // REGISTER: a part digest that is known with another size
  kTimeout = 7,
  kCancelled = 8,
  kUnauthorized = 9,  // HELLO: no token, or not one of this server's; the connection ends
};

// What became of one block of a request.
enum class BlockStatus : uint8_t {
  kOk = 0,       // COMMIT: visible. ABORT: freed. get_into: read and verified.
  kGranted = 1,  // RESERVE: the slot is the caller's until COMMIT or ABORT
  kStored = 2,   // PUT: visible
  kExists = 3,   // RESERVE, PUT: committed already
  kBusy = 4,     // RESERVE, PUT: another writer has it reserved
  kNoSpace = 5,  // RESERVE, PUT: no slot, even after eviction; or the client holds as much as it may
  kCorrupt = 6,  // PUT: the bytes do not match their CRC32C; not stored. get_into: the same, found
                 // by the reader
  kGone = 7,     // COMMIT, ABORT: no such reservation of this connection (any more)
  kMissing = 8,  // get_into: not in the store
};
inline constexpr uint8_t kLastBlockStatus = 8;

enum HelloFlags : uint32_t {
  kWantPool = 1,
  kWantWrite = 2,
  kVouch = 4,      // of earlier versions; says nothing any more
  kNoDigests = 8,  // of earlier versions
  kDigestsAsTold = 16,
};
enum class PoolAccess : uint8_t { kNone = 0, kRead = 1, kWrite = 2 };
inline constexpr uint8_t kDigestsOff = 0x80;  // beside the access; only to who said kDigestsAsTold

struct Hash {
  uint8_t bytes[kHashBytes];
  bool operator==(const Hash&) const = default;
};
static_assert(sizeof(Hash) == kHashBytes && alignof(Hash) == 1);

// Hashes that lie in someone else's memory (a frame body, a caller's buffer).
struct HashSpan {
  const Hash* data = nullptr;
  uint32_t count = 0;
  const Hash& operator[](size_t i) const { return data[i]; }
};

struct Header {
  uint8_t version = kVersion;
  Op op{};
  Status status = Status::kOk;
  uint64_t request_id = 0;
  uint32_t body_bytes = 0;
  uint64_t payload_bytes = 0;
};

enum class HeaderError { kNone, kMagic, kVersion, kOp, kBodyTooLong, kReserved };

// The payload of a PUT: each block's bytes and the line with their CRC32C.
constexpr uint64_t put_payload_bytes(uint64_t block_bytes, uint64_t blocks) {
  return (block_bytes + kLineBytes) * blocks;
}

// The most that the body of a request of this op may have, with room for a few integers and the
// padding.
constexpr uint32_t max_body_bytes(Op op) {
  constexpr uint32_t rest = 64 + kLineBytes;
  constexpr uint32_t hashes = kMaxHashes * kHashBytes + rest;
  switch (op) {
    case Op::kHello: return kMaxTextBytes + kMaxTokenBytes + rest;
    case Op::kRegister: return kMaxDocBytes + kMaxParts * 40 + 2 * kMaxTextBytes + 64 + rest;
    case Op::kMatch:
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

#include "wire/replies.h"   // IWYU pragma: export
#include "wire/requests.h"  // IWYU pragma: export
