"""The blocking client of the store: for engines, safe in threads. No call outlives its deadline."""

import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Concatenate, ParamSpec, Self, TypeVar

from kvrouter_store import _core
from kvrouter_store._core import (
    BlockStatus,
    CountReply,
    ManifestsReply,
    MatchReply,
    Segments,
    StatsReply,
    StatusesReply,
    WaitReply,
)
from kvrouter_store.client import transports
from kvrouter_store.client.batches import (
    batches,
    check_range,
    check_upto,
    hashes_of,
    parent_of,
    questions,
)
from kvrouter_store.client.dialer import Dialer, TransportName
from kvrouter_store.client.executor import Executor
from kvrouter_store.client.lease import Landing, Lease, Reservation
from kvrouter_store.client.manifest_ids import ManifestIds
from kvrouter_store.client.results import (
    Match,
    Place,
    PutResult,
    RegisteredManifest,
    SharingRefusal,
    next_page,
    there,
    understood,
)
from kvrouter_store.client.transports.base import Target, Transfer
from kvrouter_store.client.transports.slots import acquire, chosen_hashes, reserve
from kvrouter_store.connection.address import parse_url
from kvrouter_store.connection.channel import Access, Channel, Credentials, Registration
from kvrouter_store.connection.deadline import Deadline
from kvrouter_store.connection.tls import ClientTls, native_context
from kvrouter_store.connection.tokens import check_token
from kvrouter_store.errors import StoreRefused
from kvrouter_store.identity.block import Manifest
from kvrouter_store.identity.chain import HASH_BYTES
from kvrouter_store.rdma.initiator import Initiator

P = ParamSpec("P")
R = TypeVar("R")
MAX_WAIT_S = _core.MAX_DEADLINE_MS / 1000
GONE_DIGEST_SETTINGS = (
    "check_puts and digest_puts are deprecated and have no effect; digests are a setting of the "
    "node: kvrouter store --digests off"
)


class StoreClient:
    """A client of one store node.

    `url` is kv://HOST:PORT, kvs://HOST:PORT (TLS) or kv+unix:///PATH of the node's socket.
    `transport` 'auto' takes shared memory where the node's Unix socket and pool can be reached,
    else its Unix socket, else RDMA where both sides have it and there is no TLS, else TCP.
    `rdma`: with which device (this client's own from then on).
    With `verify`, the digest of every block that is read is checked, unless the node has digests
    off (`kvrouter store --digests off`): there is none then.
    Each operation ends within `deadline_s` seconds, and one second more for each 64 MiB of payload.
    Construction does not connect: the first operation does, and later ones reconnect by themselves
    where the node went away, also to a node that was restarted (manifests are then registered
    again).

    `token`: one of the node's, where it asks for one. `tls`: files of a client of kvs://.
    ValueError where either cannot be used. `check_puts`, `digest_puts`: deprecated, without effect.

    hashes: the chain from block 0 on, 32 bytes per block; a span says which of them are meant.
    Raises (every operation): StoreUnavailable where no answer came (at once while the node is known
    to be away), StoreRefused where the node said no (Unauthorized: it wants a token), StoreClosed
    after `close`, ValueError where the arguments do not fit together.
    """

    def __init__(
        self,
        url: str,
        *,
        transport: TransportName = "auto",
        verify: bool = True,
        deadline_s: float = 2.0,
        name: str = "",
        token: str = "",
        tls: ClientTls = ClientTls(),  # noqa: B008 (immutable)
        rdma: Initiator | None = None,
        check_puts: bool | None = None,
        digest_puts: bool | None = None,
    ) -> None:
        if check_puts is not None or digest_puts is not None:
            warnings.warn(GONE_DIGEST_SETTINGS, DeprecationWarning, stacklevel=2)
        self.url = url
        self.deadline_s = deadline_s
        self._verify = verify
        self._ids = ManifestIds()
        address = parse_url(url)
        credentials = Credentials(name, check_token(token), native_context(address, tls))
        prepare = self._ids.announce_all
        self._dialer = Dialer(address, transport, credentials, rdma or Initiator(), prepare)
        self._executor = Executor(self._dialer, self._ids)

    @property
    def transport(self) -> str:
        """'shm', 'unix', 'tcp' or 'rdma': how bytes travel; '' before the first operation."""
        chosen = self._dialer.chosen
        return chosen.kind if chosen else ""

    def register(self, manifest: Manifest, engine: str = "", refusal: str = "") -> Registration:
        """Register what an engine needs; with `refusal`, why it shares nothing.

        The client registers it again with a restarted node. The engine is listed while this client
        is connected.
        """
        deadline = Deadline(self.deadline_s)
        self._ids.remember(manifest, engine, refusal)
        return self._executor.run(
            Access.READ, deadline, lambda c: self._ids.announce(c, manifest, deadline)
        )

    def forget(self, manifest: Manifest) -> None:
        """Register a manifest no more with nodes that restart: the engine uses another now."""
        self._ids.forget(manifest)

    def manifests(self) -> list[RegisteredManifest]:
        """What is registered with the node, and by which living engines."""
        deadline = Deadline(self.deadline_s)

        def action(channel: Channel) -> list[RegisteredManifest]:
            found: list[RegisteredManifest] = []
            after: int | None = 0
            while after is not None:
                page = channel.ask(ManifestsReply, deadline, _core.encode_manifests, after)
                found += understood(page.manifests)
                after = next_page(page, after)
            return found

        return self._executor.run(Access.READ, deadline, action)

    def refusals(self) -> list[SharingRefusal]:
        """Which living engines share nothing, and why."""
        reply = self._ask(ManifestsReply, _core.encode_manifests)
        return [SharingRefusal(engine, reason) for engine, reason in reply.refusals]

    def match(self, manifest: Manifest, hashes: bytes) -> Match:
        """How many leading blocks the node has in full, and where."""
        deadline = Deadline(self.deadline_s)

        def action(channel: Channel) -> Match:
            known, blocks = self._ids.of(channel, manifest, deadline), len(hashes) // HASH_BYTES
            if channel.directory is not None and channel.directory.has_all(known.names, hashes):
                return Match(blocks, (Place(blocks, channel.hello.node, 0),) if blocks else ())
            found: Match | None = None
            for some in questions(hashes):
                names = known.manifest_id, some
                reply = channel.ask(MatchReply, deadline, _core.encode_match, *names)
                found = found.then(Match.of(reply)) if found is not None else Match.of(reply)
                if reply.blocks * HASH_BYTES < len(some):
                    break
            return found or Match(0)

        return self._executor.run(Access.READ, deadline, action)

    def held(self, manifest: Manifest, hashes: bytes) -> list[bool]:
        """Of each block, in any order, whether the node has it in full, in memory or on its disk.

        A node of 0.1.0 does not know the request: StoreRefused, and the connection ends.
        """
        deadline = Deadline(self.deadline_s)

        def action(channel: Channel) -> list[bool]:
            known, found = self._ids.of(channel, manifest, deadline), list[bool]()
            if channel.directory is not None and channel.directory.has_all(known.names, hashes):
                return [True] * (len(hashes) // HASH_BYTES)
            for some in questions(hashes):
                names = known.manifest_id, some
                found += there(channel.ask(StatusesReply, deadline, _core.encode_held, *names))
            return found

        return self._executor.run(Access.READ, deadline, action)

    def put(  # noqa: PLR0917
        self,
        manifest: Manifest,
        part: int,
        hashes: bytes,
        span: range,
        segments: Segments,
        indices: Sequence[int],
    ) -> PutResult:
        """Store one part of the blocks in `span`, read from `segments` at `indices` (one each).

        Blocks become visible when they are whole. What exists is left as it is. After the first
        block without space the rest is not tried.
        """
        wanted = manifest, part, hashes, span, segments, indices
        return PutResult(
            tuple(self._move(Access.WRITE, transports.put, BlockStatus.NO_SPACE, *wanted))
        )

    def get_into(  # noqa: PLR0917
        self,
        manifest: Manifest,
        part: int,
        hashes: bytes,
        span: range,
        segments: Segments,
        indices: Sequence[int],
    ) -> list[BlockStatus]:
        """Read one part of the blocks in `span` into `segments` at `indices`: a status for each.

        OK, MISSING or CORRUPT. A block is missing unless all parts of the manifest are there, and
        after the first missing block all are. A corrupt one is also deleted from the node. The
        memory of a block that is not OK holds anything.
        """
        wanted = manifest, part, hashes, span, segments, indices
        return self._move(Access.READ, _get, BlockStatus.MISSING, *wanted)

    def reserve(self, manifest: Manifest, part: int, hashes: bytes, span: range) -> Reservation:
        """Ask for slots of one part of the blocks in `span`, to fill and commit. 'shm' only."""
        deadline = Deadline(self.deadline_s)

        def action(channel: Channel) -> Reservation:
            if channel.pool is None:
                raise StoreRefused("slots are reserved over shared memory only", "NOT_ALLOWED")
            manifest_id = self._ids.of(channel, manifest, deadline).manifest_id
            target = Target(manifest_id, part, parent_of(hashes, span), hashes_of(hashes, span))
            reply = reserve(channel, target, deadline)
            return Reservation(self._executor, channel, target, reply, self.deadline_s)

        return self._executor.run(Access.WRITE, deadline, action)

    def acquire(self, manifest: Manifest, hashes: bytes, part: int | None = None) -> Lease:
        """A lease on the leading blocks that the node has: of one part, or of all.

        The node first brings into memory what is on its disk, or in a tier below it. The lease is
        on the first `MAX_HASHES` at most.
        """
        hashes = hashes[: _core.MAX_HASHES * HASH_BYTES]
        parts = range(len(manifest.parts)) if part is None else (part,)
        block_bytes = sum(manifest.parts[number].block_bytes for number in parts)
        deadline = Deadline(self.deadline_s, block_bytes * (len(hashes) // HASH_BYTES))

        def action(channel: Channel) -> Lease:
            known = self._ids.of(channel, manifest, deadline)
            owner = self, self._executor, channel, manifest, hashes
            if channel.directory is not None:
                pinned = channel.directory.acquire(known.names, part, hashes)
                if pinned is not None:
                    blocks = len(hashes) // HASH_BYTES
                    lease = Lease(*owner, blocks=blocks, held=pinned, known=known)
                    return lease.at(pinned.offsets, pinned.crcs, parts)
            reply = acquire(channel, known.manifest_id, part, hashes, len(parts), deadline)
            lease = Lease(*owner, blocks=reply.blocks, held=reply.lease_id, known=known)
            return lease.at(reply.offsets, reply.crcs, parts)

        return self._executor.run(Access.READ, deadline, action)

    def wait(
        self, manifest: Manifest, hashes: bytes, upto: int, deadline_s: float, lease: bool = False
    ) -> Landing:
        """Wait until the first `upto` blocks are there in full, at most `deadline_s` seconds.

        With `lease`, a landing takes a lease on them in the same step. ValueError: `upto` exceeds
        the chain or `MAX_HASHES`.
        """
        check_upto(hashes, upto)
        hashes = hashes_of(hashes, range(upto))
        deadline = Deadline(self.deadline_s + min(deadline_s, MAX_WAIT_S))
        end = deadline.at - self.deadline_s

        def action(channel: Channel) -> Landing:
            known = self._ids.of(channel, manifest, deadline)
            wait_ms = max(0, round((end - time.monotonic()) * 1000))
            wanted = known.manifest_id, hashes, upto, wait_ms, lease
            reply = channel.ask(WaitReply, deadline, _core.encode_wait, *wanted)
            if not (reply.landed and lease):
                return Landing(reply.landed, reply.blocks)
            owner = self, self._executor, channel, manifest, hashes
            taken = Lease(*owner, blocks=upto, held=reply.lease_id, known=known)
            return Landing(True, reply.blocks, taken)

        return self._executor.run(Access.READ, deadline, action, without_leases=True)

    def delete(self, manifest: Manifest, hashes: bytes) -> int:
        """Forget blocks (all their parts); how many the node had."""
        deadline = Deadline(self.deadline_s)

        def action(channel: Channel) -> int:
            manifest_id = self._ids.of(channel, manifest, deadline).manifest_id
            deleted = 0
            for some in questions(hashes):
                names = manifest_id, some
                deleted += channel.ask(CountReply, deadline, _core.encode_delete, *names).count
            return deleted

        return self._executor.run(Access.READ, deadline, action)

    def purge(self) -> int:
        """Forget all blocks; how many there were."""
        return self._ask(CountReply, _core.encode_purge).count

    def stats(self) -> dict[str, int]:
        """The node's gauges, and its counters (names in _total)."""
        return self._ask(StatsReply, _core.encode_stats).values

    def channels(self) -> list[Channel]:
        """The connections that the client has now."""
        return self._executor.channels()

    def close(self) -> None:
        """End all connections, and with them leases and reservations. Wakes threads that wait."""
        self._executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(
        self,
        kind: type[R],
        encode: Callable[Concatenate[int, P], bytes],
        *arguments: P.args,
        **options: P.kwargs,
    ) -> R:
        """The reply to one request, over any connection."""
        deadline = Deadline(self.deadline_s)
        return self._executor.run(
            Access.READ, deadline, lambda c: c.ask(kind, deadline, encode, *arguments, **options)
        )

    def _move(  # noqa: PLR0917
        self,
        access: Access,
        move: Callable[[Channel, Transfer, Deadline], list[BlockStatus]],
        last: BlockStatus,
        manifest: Manifest,
        part: int,
        hashes: bytes,
        span: range,
        segments: Segments,
        indices: Sequence[int],
    ) -> list[BlockStatus]:
        """Put or get by batches: a status for each block, `last` for all after the first `last`."""
        check_range(manifest, part, hashes, span, segments, indices)
        deadline = Deadline(self.deadline_s, segments.block_bytes * len(span))

        def action(batch: range, channel: Channel) -> list[BlockStatus]:
            # A store that hangs costs the time of a batch, not of all that is to be moved.
            own = Deadline(self.deadline_s, segments.block_bytes * len(batch))
            soon = min(deadline, own, key=attrgetter("at"))
            known = self._ids.of(channel, manifest, soon)
            transfer = Transfer(
                known.manifest_id,
                part,
                parent_of(hashes, batch),
                hashes_of(hashes, batch),
                known.names,
                segments,
                indices[batch.start - span.start : batch.stop - span.start],
                self._verify and channel.hello.digests,
            )
            return move(channel, transfer, soon)

        statuses: list[BlockStatus] = []
        for batch in batches(span, segments.block_bytes):
            statuses += self._executor.run(access, deadline, partial(action, batch))
            if statuses[-1] is last:
                break
        return statuses + [last] * (len(span) - len(statuses))


def _get(channel: Channel, transfer: Transfer, deadline: Deadline) -> list[BlockStatus]:
    """Get, and delete from the node what turned out corrupt."""
    statuses = transports.get_into(channel, transfer, deadline)
    if BlockStatus.CORRUPT in statuses:
        corrupt = [k for k, status in enumerate(statuses) if status is BlockStatus.CORRUPT]
        names = transfer.manifest_id, chosen_hashes(transfer.hashes, corrupt)
        channel.ask(CountReply, deadline, _core.encode_delete, *names)
    return statuses
