"""The native core: hashing, CRC32C, copies, the wire codec of csrc/wire/wire.h, and the server.

Functions that copy, hash more than 4 KiB or wait release the GIL. ValueError: an argument or a frame
breaks the rules. `Buffer` arguments are C-contiguous, and not kept beyond the call unless stated.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, final

from typing_extensions import Buffer

# ---------------------------------------------------------------- hashing

def root_hash(seed: str | None = None) -> bytes:
    """Return vLLM's NONE_HASH for `sha256_cbor`: sha256(cbor(seed or "vllm-none-hash"))."""

def chain_hashes(
    tokens: Buffer | Sequence[int],
    block_tokens: int,
    *,
    root: bytes,
    parent: bytes | None = None,
    lora: tuple[str, str] | None = None,
    cache_salt: str | None = None,
) -> bytes:
    """Return the 32-byte hashes of the full blocks of `tokens`, concatenated.

    `tokens`: uint32, int32 or int64 items, or a sequence of ints, each 0..2**32-1. A partial last block has
    no hash. `parent` continues a chain; `cache_salt` enters the first block of a chain only (parent None),
    `lora` (name, path) each block. ValueError for a token out of range or another item type.
    """

def low64(hashes: Buffer) -> list[int]:
    """Return the last 8 bytes, big-endian, of each 32-byte hash: the ids of KV events."""

# ---------------------------------------------------------------- CRC32C

def crc32c(data: Buffer, init: int = 0) -> int:
    """Return the CRC32C (Castagnoli, RFC 3720) of `data`, continuing from `init`."""

def copy_crc32c(dst: Buffer, src: Buffer) -> int:
    """Copy `src` to the start of the writable `dst` and return the CRC32C of the bytes copied."""

def crc32c_backend() -> str:
    """Return "vpclmulqdq", "vpclmulqdq and sse4.2", "sse4.2", "crc32" or "portable": what this processor can do best."""

# ---------------------------------------------------------------- memory

@final
class Segments:
    """Where blocks are in the caller's memory.

    Block i is the concatenation over k of `sizes[k]` bytes at `bases[k] + i * strides[k]` (such as one k per KV
    tensor of a layer). With `blocks`, an index >= blocks is an IndexError; without, indices are not checked. The
    memory must outlive every use.
    """

    def __init__(
        self,
        bases: Sequence[int],
        strides: Sequence[int],
        sizes: Sequence[int],
        *,
        blocks: int | None = None,
        writable: bool = True,
    ) -> None: ...
    @staticmethod
    def over(buffer: Buffer, block_bytes: int, *, writable: bool = False) -> Segments:
        """Return the segments of consecutive blocks in `buffer`, which is kept alive."""

    @property
    def block_bytes(self) -> int: ...
    @property
    def blocks(self) -> int | None: ...
    @property
    def writable(self) -> bool: ...
    @property
    def bases(self) -> list[int]: ...
    @property
    def strides(self) -> list[int]: ...
    @property
    def sizes(self) -> list[int]: ...
    def pieces(self, indices: Sequence[int]) -> list[list[tuple[int, int]]]:
        """Return the runs of memory of each block in order: address and bytes."""

    def digests(self, indices: Sequence[int]) -> list[int]:
        """Return the CRC32C of each block, computed in place."""

@final
class PoolView:
    """A mapping of a server's pool. Takes ownership of `fence_fd` (write end of the fence), not of `fd`.

    The memory is unmapped, and then the fence closed, when the view is closed or dropped AND the last copy
    in progress and the last slice are gone. Forked children do not inherit the mapping. `page_bytes`: the size of
    the pool's pages, as the server reports it; huge ones are then mapped whole. OSError.
    """

    def __init__(
        self,
        fd: int,
        size: int,
        writable: bool,
        fence_fd: int | None = None,
        *,
        prefault: bool = False,
        page_bytes: int = 0,
    ) -> None: ...
    def close(self) -> None:
        """Give the mapping up. Never blocks; later use is a ValueError."""

    def slice(self, offset: int, size: int) -> PoolSlice:
        """Return read-only bytes of the pool without a copy: memoryview(pool.slice(...))."""

    @property
    def size(self) -> int: ...

@final
class PoolSlice(Buffer):
    """Read-only bytes in a pool, by the buffer protocol; keeps the mapping alive."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class BlockNames:
    """The ids by which a node names the blocks of one manifest; `part_ids` in the manifest's order."""

    def __init__(self, spec_id: int, part_ids: Sequence[int]) -> None: ...

@final
class LocalLease:
    """Parts that stay in place in the pool while this object exists, or until `release`. Safe in threads."""

    @property
    def offsets(self) -> list[int]: ...
    @property
    def crcs(self) -> list[int]: ...
    def release(self) -> None: ...

class PostState(enum.IntEnum):
    """The node's state for a client that posts. CALLING: a client waits, send a request. CLOSED: it may not see it."""

    QUIET = 0
    CALLING = 1
    CLOSED = 2

@final
class LocalWriter:
    """Writes blocks into slots that a node on this host has lent, without a request. One thread at a time."""

    def lent(self, block_bytes: int, most: int, offsets: Sequence[int], generations: Sequence[int]) -> None:
        """Take note of a LendReply: these are all lent slots, of this size."""

    def forget(self) -> None:
        """Stop writing to all slots. To be called before a request that may end their loan."""

    def stock(self, block_bytes: int) -> int:
        """Return how many slots of this size are left to write."""

    def most(self, block_bytes: int) -> int:
        """Return how many slots of this size the node lends at a time; a large number while that is unknown."""

    def put(
        self,
        pool: PoolView,
        names: BlockNames,
        manifest_id: int,
        part: int,
        parent: bytes | None,
        hashes: bytes,
        segments: Segments,
        indices: Sequence[int],
        digest: bool,
    ) -> tuple[bytes, PostState]:
        """Copy blocks into the pool and post them, as far as slots last; return a BlockStatus for each of these.

        STORED, or EXISTS where the node has the part already.
        """

@final
class Places:
    """Where parts of blocks were in the pool. Keeps the directory mapped."""

    def stand(self) -> bool:
        """Return whether all are still there: what was read since is theirs."""

@final
class DirectoryReader:
    """Finds and copies blocks of a pool on this host without asking its server. One thread at a time.

    Maps the directory and the notes of a HELLO (neither descriptor is owned or kept). A block that it does not
    find may still exist: ask the server. OSError.
    """

    def __init__(self, fd: int, size: int, notes_fd: int) -> None: ...
    def close(self) -> None:
        """Give the mappings up. Never blocks; later use is a ValueError."""

    def writer(self) -> LocalWriter:
        """Return the writer to the same pool, which keeps the mappings that it needs."""

    def has_all(self, names: BlockNames, hashes: bytes) -> bool:
        """Return whether the directory has these blocks with all parts; if so, they count as used."""

    def acquire(self, names: BlockNames, part: int | None, hashes: bytes) -> LocalLease | None:
        """Pin one part or all parts of these blocks in place. None: ask the server.

        The lease's `offsets` and `crcs` are those of each part of each block, block by block.
        """

    def at(
        self, names: BlockNames, part: int, hashes: bytes, offsets: Sequence[int]
    ) -> Places | None:
        """Return where one part of these blocks is, to be compared after a read; safe in threads.

        None: not all of them are found with all parts, each at its offset in the pool.
        """

    def read(
        self,
        pool: PoolView,
        names: BlockNames,
        part: int,
        hashes: bytes,
        segments: Segments,
        indices: Sequence[int],
        verify: bool,
    ) -> int:
        """Copy one part of the leading blocks out of the pool; return how many came whole.

        With `verify` they are checked against their digests. The memory of the next block holds anything.
        """

def current_numa_node() -> int | None:
    """Return the NUMA node of the CPU that runs this thread; None where the kernel does not say."""

def gather(
    pool: PoolView, segments: Segments, indices: Sequence[int], offsets: Sequence[int], digest: bool
) -> list[int]:
    """Copy blocks `indices` of the caller's memory into the slots at `offsets`; return the CRC32C of each.

    Without `digest` the CRC32Cs are 0.
    """

def scatter(
    pool: PoolView,
    segments: Segments,
    indices: Sequence[int],
    offsets: Sequence[int],
    crcs: Sequence[int] | None,
) -> list[bool]:
    """Copy slots into the caller's memory; return whether the bytes copied match `crcs` (True without)."""

class TlsError(ConnectionError):
    """TLS failed; the message is the reason as a part of a sentence (a certificate, an end without TLS)."""

@final
class TlsContext:
    """The certificate and the trusted CAs of one end of TLS 1.3: PEM files, read at once. Safe in threads.

    ValueError in one sentence: a file cannot be used, a key has a passphrase, or libssl (OpenSSL 3) is missing.
    """

    @staticmethod
    def server(*, cert_file: str, key_file: str, ca_file: str = "") -> TlsContext:
        """Return a node's context. `cert_file` is its chain; with `ca_file` clients must show a certificate of it."""

    @staticmethod
    def client(
        *, cert_file: str = "", key_file: str = "", ca_file: str = "", check_host: bool = True
    ) -> TlsContext:
        """Return a client's context. The server's certificate must be of `ca_file`, or of a CA of this machine.

        It must name the host if `check_host`. The client shows `cert_file` where the server asks for one.
        """

def tune_tcp(fd: int) -> None:
    """Set up the caller's connected TCP socket: small frames are sent at once.

    Without pacing where the peer is on this host, if the kernel allows that.
    """

class ProtocolError(ConnectionError):
    """The server sent no reply of the protocol, or another one than was asked for."""

@final
class Link:
    """A blocking client's connection over a connected stream socket, which stays the caller's. One thread at a time.

    `digests`: whether puts compute digests; False where the server has them off.

    Deadlines are readings of time.monotonic(). Every exchange may raise TimeoutError after its deadline,
    ProtocolError, TlsError where TLS fails, another OSError where the socket fails; then the connection is of no
    more use. Signal handlers run meanwhile. Never raises SIGPIPE.
    """

    digests: bool

    def __init__(self, fd: int, context: TlsContext | None = None, host: str = "") -> None: ...
    def handshake(self, deadline: float) -> None:
        """Do the TLS handshake, before anything else. Under TLS only."""

    def ask(self, frame: bytes, deadline: float) -> _Answer | ErrorReply:
        """Send a request without payload and return its reply, which has the same request id and op."""

    def next_id(self) -> int:
        """Return a request id that this link has not used."""

    def put(
        self,
        manifest_id: int,
        part: int,
        parent: bytes | None,
        hashes: bytes,
        segments: Segments,
        indices: Sequence[int],
        deadline: float,
    ) -> list[BlockStatus] | ErrorReply:
        """Send a PUT straight from the caller's memory, each block with its CRC32C; return a status for each."""

    def get(
        self,
        manifest_id: int,
        part: int,
        hashes: bytes,
        segments: Segments,
        indices: Sequence[int],
        verify: bool,
        deadline: float,
    ) -> list[BlockStatus] | ErrorReply:
        """Send a GET and receive blocks straight into the caller's memory; return OK, CORRUPT or MISSING for each.

        `verify` checks digests. The memory of a block that is not OK may be written, also where this raises.
        """

    def quiet(self) -> bool:
        """Return whether the connection is up and nothing came that was not asked for. Does not wait."""

# ---------------------------------------------------------------- wire codec (specification: csrc/wire/wire.h)

HEADER_BYTES: int
VERSION: int
MAX_BODY_BYTES: int
MAX_CARD_BYTES: int
MAX_HASHES: int
MAX_DEADLINE_MS: int

class Op(enum.IntEnum):
    HELLO = 1
    REGISTER = 2
    MANIFESTS = 3
    MATCH = 4
    RESERVE = 5
    COMMIT = 6
    ABORT = 7
    PUT = 8
    ACQUIRE = 9
    RELEASE = 10
    GET = 11
    WAIT = 12
    CANCEL = 13
    DELETE = 14
    PURGE = 15
    STATS = 16
    LEND = 17
    ATTACH = 18
    HELD = 19

class Status(enum.IntEnum):
    OK = 0
    BAD_REQUEST = 1
    UNSUPPORTED_VERSION = 2
    UNKNOWN_MANIFEST = 3
    LIMIT = 4
    NOT_ALLOWED = 5
    CONFLICT = 6
    TIMEOUT = 7
    CANCELLED = 8
    UNAUTHORIZED = 9

class BlockStatus(enum.IntEnum):
    OK = 0
    GRANTED = 1
    STORED = 2
    EXISTS = 3
    BUSY = 4
    NO_SPACE = 5
    CORRUPT = 6
    GONE = 7
    MISSING = 8

class PoolAccess(enum.IntEnum):
    NONE = 0
    READ = 1
    WRITE = 2

def encode_hello(
    request_id: int,
    *,
    name: str = "",
    token: str = "",
    want_pool: bool = False,
    want_write: bool = False,
    numa_node: int | None = None,
) -> bytes: ...
def encode_register(
    request_id: int,
    *,
    spec: bytes,
    manifest: bytes,
    engine: str,
    refusal: str,
    doc: bytes,
    parts: Sequence[tuple[bytes, int]],
) -> bytes: ...
def encode_manifests(request_id: int, after: int = 0) -> bytes: ...
def encode_held(request_id: int, manifest_id: int, hashes: Buffer) -> bytes: ...
def encode_match(request_id: int, manifest_id: int, hashes: Buffer, promote: bool = False) -> bytes:
    """`promote`: bring blocks of slower tiers into memory; the reply does not wait for that."""

def encode_reserve(request_id: int, manifest_id: int, part: int, parent: bytes | None, hashes: Buffer) -> bytes: ...
def encode_lend(request_id: int, manifest_id: int, part: int, parent: bytes | None) -> bytes: ...
def encode_attach(request_id: int, card: bytes, rail: int = 0) -> bytes: ...
def encode_commit(
    request_id: int, manifest_id: int, part: int, hashes: Buffer, generations: Sequence[int], crcs: Sequence[int]
) -> bytes: ...
def encode_abort(
    request_id: int, manifest_id: int, part: int, hashes: Buffer, generations: Sequence[int]
) -> bytes: ...
def encode_acquire(request_id: int, manifest_id: int, part: int | None, hashes: Buffer) -> bytes:
    """`part` None: all parts of the manifest."""

def encode_release(request_id: int, lease_id: int) -> bytes: ...
def encode_wait(
    request_id: int, manifest_id: int, hashes: Buffer, upto: int, deadline_ms: int, lease: bool = False
) -> bytes: ...
def encode_cancel(request_id: int, wait_request_id: int) -> bytes: ...
def encode_delete(request_id: int, manifest_id: int, hashes: Buffer) -> bytes: ...
def encode_purge(request_id: int) -> bytes: ...
def encode_stats(request_id: int) -> bytes: ...

@final
class Header:
    @property
    def op(self) -> Op: ...
    @property
    def status(self) -> Status: ...
    @property
    def request_id(self) -> int: ...
    @property
    def body_bytes(self) -> int: ...
    @property
    def payload_bytes(self) -> int: ...

def decode_header(data: Buffer, offset: int = 0) -> Header:
    """Decode the header of a reply at `offset`. ValueError if it breaks a rule; the connection is of no more use."""

@final
class HelloReply:
    @property
    def epoch(self) -> int: ...
    @property
    def session(self) -> int: ...
    @property
    def pool_bytes(self) -> int: ...
    @property
    def granule_bytes(self) -> int: ...
    @property
    def node(self) -> int: ...
    @property
    def access(self) -> PoolAccess: ...
    @property
    def directory_bytes(self) -> int: ...
    @property
    def unix_path(self) -> str: ...
    @property
    def boot_id(self) -> str: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def digests(self) -> bool:
        """Whether the node has digests: False where they are off."""

@final
class RegisterReply:
    @property
    def manifest_id(self) -> int: ...
    @property
    def spec_id(self) -> int: ...
    @property
    def part_ids(self) -> list[int]: ...

@final
class ManifestInfo:
    @property
    def manifest_id(self) -> int: ...
    @property
    def spec_id(self) -> int: ...
    @property
    def digest(self) -> bytes: ...
    @property
    def doc(self) -> bytes: ...
    @property
    def engines(self) -> list[str]: ...
    @property
    def part_ids(self) -> list[int]: ...

@final
class ManifestsReply:
    @property
    def more(self) -> bool:
        """Whether to ask again with `after` = the last manifest_id of this page."""

    @property
    def manifests(self) -> list[ManifestInfo]: ...
    @property
    def refusals(self) -> list[tuple[str, str]]:
        """(engine, reason) of the living connections; in the first page only."""

@final
class MatchReply:
    @property
    def blocks(self) -> int: ...
    @property
    def places(self) -> list[tuple[int, int, int]]:
        """(leading blocks, node, tier) of each place."""

@final
class ReserveReply:
    @property
    def statuses(self) -> bytes:
        """One BlockStatus per hash."""

    @property
    def offsets(self) -> list[int]: ...
    @property
    def generations(self) -> list[int]: ...

@final
class AttachReply:
    """The server's end of the RDMA connection; kvrouter_store.rdma.base reads the card."""

    @property
    def card(self) -> bytes: ...

@final
class LendReply:
    """All slots lent to the connection now; `most`: how many of this size it may have."""

    @property
    def most(self) -> int: ...
    @property
    def offsets(self) -> list[int]: ...
    @property
    def generations(self) -> list[int]: ...

@final
class StatusesReply:
    """COMMIT, ABORT, PUT."""

    @property
    def statuses(self) -> bytes:
        """One BlockStatus per hash."""

@final
class AcquireReply:
    """Slot k of block i is at i * len(part_bytes) + k of the three lists (new lists at each access)."""

    @property
    def lease_id(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    @property
    def part_bytes(self) -> list[int]: ...
    @property
    def offsets(self) -> list[int]: ...
    @property
    def generations(self) -> list[int]: ...
    @property
    def crcs(self) -> list[int]: ...

@final
class GetReply:
    @property
    def part_bytes(self) -> int: ...
    @property
    def crcs(self) -> list[int]:
        """One per block of the leading run, whose bytes are the payload."""

@final
class WaitReply:
    @property
    def landed(self) -> bool: ...
    @property
    def blocks(self) -> int: ...
    @property
    def lease_id(self) -> int: ...

@final
class FlagReply:
    """RELEASE: whether the lease was held throughout. CANCEL: whether the WAIT was pending."""

    @property
    def flag(self) -> bool: ...

@final
class CountReply:
    """DELETE, PURGE: how many blocks were forgotten."""

    @property
    def count(self) -> int: ...

@final
class StatsReply:
    @property
    def values(self) -> dict[str, int]: ...

@final
class ErrorReply:
    @property
    def status(self) -> Status: ...
    @property
    def message(self) -> str: ...

_Answer: TypeAlias = (
    HelloReply | RegisterReply | ManifestsReply | MatchReply | ReserveReply | StatusesReply | AcquireReply
    | GetReply | WaitReply | FlagReply | CountReply | StatsReply | LendReply | AttachReply
)
_Reply: TypeAlias = _Answer | ErrorReply

def decode_reply(header: Header, data: Buffer, offset: int = 0) -> _Reply:
    """Decode the body at `offset` of `data`: the reply type of header.op, or ErrorReply.

    ErrorReply if header.status is not OK (except WAIT's TIMEOUT and CANCELLED: a WaitReply). ValueError if the
    body does not parse to its last byte; the connection is of no more use.
    """

# ---------------------------------------------------------------- server

DISK_IO_KINDS: tuple[str, ...]
"""The ways to read and write a disk, the best first."""

EVICTION_POLICIES: tuple[str, ...]
"""The policies that choose blocks to evict, the default first."""

@final
class Placement:
    """Which pages a pool gets, each kind in bytes (0: not this kind), and of which NUMA nodes.

    Huge pages that the host has set aside are tried first; with `explicit_only` a server without them does
    not start (OSError, ENOMEM). Then transparent huge pages: by touch, or else only in a prefaulted pool. Then
    small ones. `numa_nodes`: the pool has one region for each, with pages of that node while it has any.
    ValueError for an impossible page size or node.
    """

    def __init__(
        self,
        *,
        explicit_page_bytes: int = 0,
        explicit_only: bool = False,
        transparent_page_bytes: int = 0,
        transparent_by_touch: bool = True,
        numa_nodes: Sequence[int] = (),
    ) -> None: ...
    @property
    def explicit_page_bytes(self) -> int: ...
    @property
    def explicit_only(self) -> bool: ...
    @property
    def transparent_page_bytes(self) -> int: ...
    @property
    def transparent_by_touch(self) -> bool: ...
    @property
    def numa_nodes(self) -> list[int]: ...

@final
class Placed:
    """Where a pool's memory came from."""

    @property
    def pages(self) -> str:
        """explicit, transparent or small."""

    @property
    def page_bytes(self) -> int: ...
    @property
    def huge_error(self) -> int:
        """Why some or all of it is not in the wanted pages (an errno); 0 for none."""

    @property
    def numa_error(self) -> int:
        """Why it is bound to no NUMA node (an errno); 0 for none."""

    @property
    def numa_regions(self) -> int:
        """How many NUMA nodes hold a part of it; 0 where it is bound to none."""

@final
class TierAsk:
    """A question of a request that waits: which of the blocks that the node lacks a tier has."""

    @property
    def id(self) -> int: ...
    @property
    def load(self) -> bool:
        """Whether they are to be put into the node before the answer."""

    @property
    def tenant(self) -> str: ...
    @property
    def manifest(self) -> bytes:
        """The digest of the manifest."""

    @property
    def hashes(self) -> bytes:
        """All hashes of the request, 32 bytes per block; of a load, a chain."""

    @property
    def missing(self) -> list[int]:
        """The places in `hashes` of blocks that the node lacks, ascending."""

class BlockChange:
    """A block that the node holds whole now (`stored`), or not any more. May be told twice."""

    @property
    def stored(self) -> bool: ...
    @property
    def in_memory(self) -> bool:
        """Of a stored one, whether it need not be read from the disk."""

    @property
    def tenant(self) -> str: ...
    @property
    def manifest(self) -> bytes:
        """The digest of the manifest of which it has all parts."""

    @property
    def hash(self) -> bytes: ...
    @property
    def parent(self) -> bytes | None:
        """The block before it; None: it begins a chain, or it is gone."""

class AttachEvent:
    """An order to the RDMA host: make a queue pair for a session (`begins`), or end the one it has."""

    @property
    def session(self) -> int: ...
    @property
    def begins(self) -> bool: ...
    @property
    def rail(self) -> int: ...
    @property
    def card(self) -> bytes:
        """The client's end of the connection; empty where the queue pair ends."""

@final
class StoreServer:
    """A store node: TCP and Unix listeners, one thread of its own, one pool. Not started by the constructor.

    `port` 0 takes a free one. `pool_bytes` is rounded up to granules (power of two, 4..64 KiB). `prefault`
    touches the whole pool in start(). A connection ends if a frame is not complete, or a reply not read, within
    `frame_deadline_s` seconds (per MiB of payload). `unix_path`: created with `unix_mode`, removed by stop(); a stale
    socket file is replaced, one in use is an OSError. `eviction`: one of EVICTION_POLICIES. `tenants`: names and
    tokens; clients must then show one of the tokens. `quotas`: bytes of the pool by tenant; ValueError where they
    exceed the pool, or name an unknown tenant. `tls`: a server's context; clients over TCP must then use TLS. A
    connection has 5 seconds for its HELLO, with the handshake. `placement`: which pages the pool gets; `pool_bytes`
    is rounded up to whole pages. `lend_bytes`: bytes that a client on this host may have lent, to put without a
    request; None: a 32nd of the pool, at most 64 MiB. `reserve_bytes`: bytes that one client may have reserved, lent
    and fenced together; None: a quarter of the pool. Reservations of a connection end when it sends nothing for
    `reserve_timeout_s` seconds.

    `disk`: folder of the SSD tier's two files, with reserved space together `disk_bytes`; `disk_io`: "auto" or one
    of DISK_IO_KINDS; a request waits at most `disk_read_timeout_s` seconds for its blocks.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        unix_path: str | None = None,
        pool_bytes: int,
        granule_bytes: int = 16384,
        node: int = 0,
        prefault: bool = False,
        max_connections: int = 1024,
        frame_deadline_s: float = 30.0,
        unix_mode: int = 0o600,
        eviction: str = "density",
        tenants: Sequence[tuple[str, str]] = (),
        quotas: Mapping[str, int] = ...,
        disk: str | None = None,
        disk_bytes: int = 0,
        disk_io: str = "auto",
        disk_read_timeout_s: float = 1.0,
        tls: TlsContext | None = None,
        placement: Placement | None = None,
        lend_bytes: int | None = None,
        reserve_bytes: int | None = None,
        reserve_timeout_s: float = 30.0,
        digests: bool = True,
    ) -> None: ...
    def start(self) -> None:
        """Map the pool, open the disk, bind and start the thread. OSError; of the disk with its folder as filename."""

    def flush_disk(self, timeout_s: float) -> tuple[str, int, int]:
        """Wait until every block committed so far is durable on the disk.

        Returns why it is not ("" where it is), the number of durable blocks, and the number of parts that were
        not written since the node started.
        """

    def take_notices(self) -> list[tuple[bool, str]]:
        """Return the news of the disk since the last call: whether it is bad, and a sentence."""

    @property
    def notice_fd(self) -> int:
        """A descriptor, the server's own, that is readable while there are notices. -1 without a disk."""

    def offer_tiers(self, timeout_s: float) -> int:
        """From now on requests for blocks that the node lacks wait for tiers, at most `timeout_s`.

        With 0 they do not wait any more. Returns a descriptor that is readable while take_tier_asks() has
        questions; the server's own until stop(). ValueError unless running.
        """

    def take_tier_asks(self) -> list[TierAsk]:
        """Return the questions, each once. One whose request has ended is left out."""

    def answer_tier(self, id: int, found: int) -> bool:
        """Of the missing blocks, the first `found` are in a tier, or have been put into the node.

        False: nothing waits for it any more.
        """

    def tell_tier(self, name: str, up: bool) -> None:
        """Have stats tell whether the tier of this name answers now."""

    def offer_feed(self, most: int) -> int:
        """Begin a feed that keeps what changes in the node, at most `most` blocks.

        Returns its descriptor, readable while take_feed() has something; the server's own until stop().
        ValueError unless running.
        """

    def restart_feed(self, feed: int) -> None:
        """Tell all that the node holds once more."""

    def take_feed(self, feed: int) -> tuple[list[BlockChange], bool, bool]:
        """Return some changes, each once; whether changes before these were lost; whether there are more."""

    def manifest(self, tenant: str, digest: bytes) -> bytes | None:
        """Return the document of a manifest; None if the tenant has none of this digest."""

    def offer_attach(self, most: int) -> int:
        """From now on let connections attach for RDMA, at most `most` at a time (0: no further ones).

        Returns a descriptor that is readable while take_attach_events() has events; the server's own until
        stop(). ValueError unless running.
        """

    def take_attach_events(self) -> list[AttachEvent]:
        """Return the orders to the RDMA host, each once, in the order of the requests."""

    def attached(self, session: int, card: bytes) -> bool:
        """Give the session's client this card. False: the session ended; end its queue pair."""

    def refuse_attachment(self, session: int, status: Status, why: str) -> bool:
        """Refuse the session a queue pair. False: the session ended."""

    def fenced(self, session: int) -> None:
        """Free the slots of the session: its queue pair reads and writes the pool no more.

        Ends the session if it has not ended.
        """

    @property
    def pool_address(self) -> int:
        """The address of the pool in this process; 0 unless running."""

    def drain(self) -> int:
        """Accept no more connections and end each one when it has nothing in flight.

        In flight are requests, replies, reservations and leases; waits end by TIMEOUT once no connection writes.
        Returns a descriptor that is readable when the last connection has ended; the server's own until stop().
        Idempotent. ValueError unless running.
        """

    def stop(self) -> None:
        """Close every connection, join the thread, give the pool back. Idempotent."""

    def stats(self) -> dict[str, int]:
        """Return gauges, *_total counters and times (Node::stats; names: Stat in csrc/wire/replies.h)."""

    def admits(self, token: str) -> bool:
        """Return whether this is a token of the node, or the node needs none. False unless running.

        Takes the same time however similar the tokens are. Refusals are counted.
        """

    def follow_tokens(self, tenants: Sequence[tuple[str, str]]) -> int:
        """Replace the tokens of the same tenants; return how many connections ended for that.

        Connections with a removed token end, and with them what they held. ValueError, without a change, for other
        tenants or unless running.
        """

    def follow_tls(self, tls: TlsContext) -> None:
        """Use this context for new connections over TCP. ValueError where the node was started without TLS."""

    def purge(self, token: str | None = None) -> int:
        """Forget all blocks, or those of the tenant with this token; return how many.

        Leased bytes stay valid until released.
        """

    @property
    def placed(self) -> Placed:
        """The pool's pages and NUMA nodes; small pages of 0 bytes unless running."""

    @property
    def port(self) -> int: ...
    @property
    def unix_path(self) -> str | None: ...
    @property
    def epoch(self) -> int: ...
    @property
    def draining(self) -> bool:
        """Whether drain() has been called since start()."""
    @property
    def running(self) -> bool: ...
