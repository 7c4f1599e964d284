"""The blocking client of the store: for engines, safe in threads. No call outlives its deadline."""

import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Self

from kvrouter_store import _core
from kvrouter_store._core import (
    BlockStatus,
    CountReply,
    LocalLease,
    ManifestsReply,
    MatchReply,
    Segments,
    StatsReply,
    WaitReply,
)
from kvrouter_store.client.executor import Executor
from kvrouter_store.client.lease import Landing, Lease, Reservation
from kvrouter_store.client.leased_blocks import LeasedBlocks
from kvrouter_store.client.ranges import (
    HASH_BYTES,
    batches,
    check_span,
    check_upto,
    hashes_of,
    parent_of,
)
from kvrouter_store.client.results import (
    Match,
    Place,
    PutResult,
    RegisteredManifest,
    SharingRefusal,
    understood,
)
from kvrouter_store.client.transport_choice import TransportName
from kvrouter_store.client.transports import transport_of
from kvrouter_store.client.transports.base import Read, Target, Write
from kvrouter_store.client.transports.slots import acquire, reserve
from kvrouter_store.connection.address import parse_url
from kvrouter_store.connection.channel import Access, Channel, Deadline
from kvrouter_store.connection.registration import Registration
from kvrouter_store.connection.tls import ClientTls, native_context
from kvrouter_store.connection.tokens import check_token
from kvrouter_store.errors import StoreRefused
from kvrouter_store.identity.block import Manifest
from kvrouter_store.rdma.initiator import Initiator

__all__ = ["GONE_DIGEST_SETTINGS", "StoreClient", "TransportName"]

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
        self._verify = verify
        self.deadline_s = deadline_s
        address = parse_url(url)
        context = native_context(address, tls)
        self._session = Executor(
            address,
            transport,
            name,
            check_token(token),
            context,
            rdma=rdma or Initiator(),
        )

    @property
    def transport(self) -> str:
        """'shm', 'unix', 'tcp' or 'rdma': how bytes travel; '' before the first operation."""
        way = self._session.route.known
        return way.kind if way else ""

    def register(self, manifest: Manifest, engine: str = "", refusal: str = "") -> Registration:
        """Tell the node what an engine needs; with `refusal`, why it shares nothing.

        It is told again to a restarted node. The engine is listed while this client is connected.
        """
        deadline = Deadline(self.deadline_s)
        self._session.registry.remember(manifest, engine, refusal)
        return self._session.operate(
            Access.READ, deadline, lambda c: self._session.registry.announce(c, manifest, deadline)
        )

    def manifests(self) -> list[RegisteredManifest]:
        """What is registered with the node, and by which living engines."""
        deadline = Deadline(self.deadline_s)
        return self._session.operate(Access.READ, deadline, lambda c: _manifests(c, deadline))

    def refusals(self) -> list[SharingRefusal]:
        """Which living engines share nothing, and why."""
        deadline = Deadline(self.deadline_s)

        def action(channel: Channel) -> list[SharingRefusal]:
            reply = channel.ask(ManifestsReply, _core.encode_manifests(channel.next_id()), deadline)
            return [SharingRefusal(engine, reason) for engine, reason in reply.refusals]

        return self._session.operate(Access.READ, deadline, action)

    def match(self, manifest: Manifest, hashes: bytes) -> Match:
        """How many leading blocks the node has in full, and where."""
        deadline = Deadline(self.deadline_s)

        def action(channel: Channel) -> Match:
            known = self._session.registry.known(channel, manifest, deadline)
            blocks = len(hashes) // HASH_BYTES
            if channel.directory is not None and channel.directory.has_all(known.names, hashes):
                return Match(blocks, (Place(blocks, channel.hello.node, 0),) if blocks else ())
            frame = _core.encode_match(channel.next_id(), known.manifest_id, hashes)
            reply = channel.ask(MatchReply, frame, deadline)
            return Match(reply.blocks, tuple(map(Place._make, reply.places)))

        return self._session.operate(Access.READ, deadline, action)

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
        check_span(manifest, part, hashes, span, segments, indices)
        deadline = Deadline(self.deadline_s, segments.block_bytes * len(span))

        def move(batch: range, channel: Channel) -> list[BlockStatus]:
            known = self._session.registry.known(channel, manifest, deadline)
            parent, moved = parent_of(hashes, batch), hashes_of(hashes, batch)
            chosen = indices[batch.start - span.start : batch.stop - span.start]
            write = Write(known.manifest_id, part, parent, moved, known.names, segments, chosen)
            return transport_of(channel).put(channel, write, deadline)

        def put(batch: range) -> list[BlockStatus]:
            return self._session.operate(Access.WRITE, deadline, partial(move, batch))

        return PutResult(tuple(_moved(put, span, segments.block_bytes, BlockStatus.NO_SPACE)))

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
        check_span(manifest, part, hashes, span, segments, indices)
        deadline = Deadline(self.deadline_s, segments.block_bytes * len(span))

        def move(batch: range, channel: Channel) -> list[BlockStatus]:
            known = self._session.registry.known(channel, manifest, deadline)
            chosen = indices[batch.start - span.start : batch.stop - span.start]
            moved, verify = hashes_of(hashes, batch), self._verify and channel.hello.digests
            read = Read(known.manifest_id, known.names, part, moved, segments, chosen, verify)
            statuses = transport_of(channel).get_into(channel, read, deadline)
            if BlockStatus.CORRUPT in statuses:
                _forget_corrupt(channel, read, statuses, deadline)
            return statuses

        def get(batch: range) -> list[BlockStatus]:
            return self._session.operate(Access.READ, deadline, partial(move, batch))

        return _moved(get, span, segments.block_bytes, BlockStatus.MISSING)

    def reserve(self, manifest: Manifest, part: int, hashes: bytes, span: range) -> Reservation:
        """Ask for slots of one part of the blocks in `span`, to fill and commit. 'shm' only."""
        deadline = Deadline(self.deadline_s)

        def action(channel: Channel) -> Reservation:
            if channel.pool is None:
                raise StoreRefused("slots are reserved over shared memory only", "NOT_ALLOWED")
            manifest_id = self._session.registry.id_of(channel, manifest, deadline)
            chosen, parent = hashes_of(hashes, span), parent_of(hashes, span)
            target = Target(manifest_id, part, parent, chosen)
            reply = reserve(channel, target, deadline)
            lane = self._session.lane_of(channel)
            return Reservation(lane, channel, target, reply, self.deadline_s)

        return self._session.operate(Access.WRITE, deadline, action)

    def acquire(self, manifest: Manifest, hashes: bytes, part: int | None = None) -> Lease:
        """A lease on the leading blocks that the node has: of one part, or of all."""
        deadline = Deadline(self.deadline_s)
        parts = range(len(manifest.parts)) if part is None else (part,)

        def action(channel: Channel) -> Lease:
            known = self._session.registry.known(channel, manifest, deadline)
            if channel.directory is not None:
                pinned = channel.directory.acquire(known.names, part, hashes)
                if pinned is not None:
                    lease = self._lease(
                        channel, manifest, hashes, len(hashes) // HASH_BYTES, pinned
                    )
                    return lease.at(pinned.offsets, pinned.crcs, parts)
            reply = acquire(channel, known.manifest_id, part, hashes, len(parts), deadline=deadline)
            lease = self._lease(channel, manifest, hashes, reply.blocks, reply.lease_id)
            return lease.at(reply.offsets, reply.crcs, parts)

        return self._session.operate(Access.READ, deadline, action)

    def wait(
        self, manifest: Manifest, hashes: bytes, upto: int, deadline_s: float, lease: bool = False
    ) -> Landing:
        """Wait until the first `upto` blocks are there in full, at most `deadline_s` seconds.

        With `lease`, a landing takes a lease on them in the same step.
        """
        check_upto(hashes, upto)
        wait_s = min(deadline_s, MAX_WAIT_S)
        deadline = Deadline(self.deadline_s + wait_s)
        end = deadline.at - self.deadline_s

        def action(channel: Channel) -> Landing:
            manifest_id = self._session.registry.id_of(channel, manifest, deadline)
            wait_ms = max(0, round((end - time.monotonic()) * 1000))
            frame = _core.encode_wait(channel.next_id(), manifest_id, hashes, upto, wait_ms, lease)
            reply = channel.ask(WaitReply, frame, deadline)
            if not (reply.landed and lease):
                return Landing(reply.landed, reply.blocks)
            taken = self._lease(channel, manifest, hashes, upto, reply.lease_id)
            return Landing(True, reply.blocks, taken)

        return self._session.operate(Access.READ, deadline, action, without_leases=True)

    def delete(self, manifest: Manifest, hashes: bytes) -> int:
        """Forget blocks (all their parts); how many the node had."""
        deadline = Deadline(self.deadline_s)

        def action(channel: Channel) -> int:
            manifest_id = self._session.registry.id_of(channel, manifest, deadline)
            frame = _core.encode_delete(channel.next_id(), manifest_id, hashes)
            return _count(channel, frame, deadline)

        return self._session.operate(Access.READ, deadline, action)

    def purge(self) -> int:
        """Forget all blocks; how many there were."""
        deadline = Deadline(self.deadline_s)
        return self._session.operate(
            Access.READ,
            deadline,
            lambda c: _count(c, _core.encode_purge(c.next_id()), deadline),
        )

    def stats(self) -> dict[str, int]:
        """The node's gauges, and its counters (names in _total)."""
        deadline = Deadline(self.deadline_s)

        def action(channel: Channel) -> dict[str, int]:
            reply = channel.ask(StatsReply, _core.encode_stats(channel.next_id()), deadline)
            return reply.values

        return self._session.operate(Access.READ, deadline, action)

    def close(self) -> None:
        """End all connections, and with them leases and reservations. Wakes threads that wait."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def _lease(
        self,
        channel: Channel,
        manifest: Manifest,
        hashes: bytes,
        blocks: int,
        held: int | LocalLease,
    ) -> Lease:
        source = LeasedBlocks(self, manifest, hashes)
        return Lease(blocks, held, source, self._session.lane_of(channel), channel)


def _count(channel: Channel, frame: bytes, deadline: Deadline) -> int:
    reply = channel.ask(CountReply, frame, deadline)
    return reply.count


def _manifests(channel: Channel, deadline: Deadline) -> list[RegisteredManifest]:
    found: list[RegisteredManifest] = []
    after, more = 0, True
    while more:
        frame = _core.encode_manifests(channel.next_id(), after)
        reply = channel.ask(ManifestsReply, frame, deadline)
        infos = reply.manifests
        found += understood(infos)
        more = reply.more and bool(infos)
        after = infos[-1].manifest_id if infos else after
    return found


def _moved(
    move: Callable[[range], list[BlockStatus]], span: range, block_bytes: int, last: BlockStatus
) -> list[BlockStatus]:
    """Let `move` do the span, batch by batch: what follows a status `last` is alike."""
    statuses: list[BlockStatus] = []
    for batch in batches(span, block_bytes):
        statuses += move(batch)
        if statuses[-1] is last:
            break
    return statuses + [last] * (len(span) - len(statuses))


def _forget_corrupt(
    channel: Channel, read: Read, statuses: list[BlockStatus], deadline: Deadline
) -> None:
    corrupt = [k for k, status in enumerate(statuses) if status is BlockStatus.CORRUPT]
    doomed = b"".join(hashes_of(read.hashes, range(k, k + 1)) for k in corrupt)
    frame = _core.encode_delete(channel.next_id(), read.manifest_id, doomed)
    channel.ask(CountReply, frame, deadline)
