"""The blocking client of the store: for engines, safe in threads. No call outlives its deadline."""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from kvstore import _core, long_way
from kvstore._core import (
    BlockStatus,
    CountReply,
    LocalLease,
    ManifestsReply,
    Segments,
    StatsReply,
    WaitReply,
)
from kvstore.address import parse_url
from kvstore.answers import (
    Match,
    Place,
    PutResult,
    Refusal,
    RegisteredManifest,
    Registration,
    understood,
)
from kvstore.block import Manifest
from kvstore.connection import Access, Channel, Deadline, PutDigests
from kvstore.credentials import check_token
from kvstore.errors import StoreRefused
from kvstore.lease import Landing, Lease, Reservation
from kvstore.leased_blocks import LeasedBlocks
from kvstore.rdma.initiator import Initiator
from kvstore.route import TransportName
from kvstore.session import Session
from kvstore.spans import HASH_BYTES, check_upto, hashes_of, parent_of
from kvstore.tls import ClientTls, native_context
from kvstore.transports.base import Target
from kvstore.transports.slots import acquire, reserve

__all__ = ["StoreClient", "TransportName"]

MAX_WAIT_S = _core.MAX_DEADLINE_MS / 1000


class StoreClient:
    """A client of one store node.

    `url` is kv://HOST:PORT, kvs://HOST:PORT (TLS) or kv+unix:///PATH of the node's socket.
    `transport` 'auto' takes shared memory where the node's Unix socket and pool can be reached,
    else its Unix socket, else RDMA where both sides have it and there is no TLS, else TCP.
    `rdma`: with which device (this client's own from then on).
    With `verify`, the digest of every block that is read is checked. With `check_puts`, the node
    also checks the digest of what comes over a socket before anybody finds it; without, it stores
    the digest computed here, which every reader checks (who reads the pool in place is given the
    block when the node has checked it). Without `verify` and `digest_puts` this client has nothing
    to do with digests: the node computes that of a block which it holds when first somebody needs
    it, and nobody notices what was changed before.
    Each operation ends within `deadline_s` seconds, and one second more for each 64 MiB of payload.
    Construction does not connect: the first operation does, and later ones reconnect by themselves
    where the node went away, also to a node that was restarted (manifests are then registered
    again).

    `token`: one of the node's, where it asks for one. `tls`: files of a client of kvs://.
    ValueError where either cannot be used.

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
        check_puts: bool = True,
        digest_puts: bool = True,
        deadline_s: float = 2.0,
        name: str = "",
        token: str = "",
        tls: ClientTls = ClientTls(),  # noqa: B008 (immutable)
        rdma: Initiator | None = None,
    ) -> None:
        self.url = url
        if verify and not digest_puts:
            raise ValueError("a client that verifies has digests: digest_puts needs verify=False")
        self._verify = verify
        self.deadline_s = deadline_s
        address = parse_url(url)
        context = native_context(address, tls)
        self._session = Session(
            address,
            transport,
            name,
            check_token(token),
            context,
            rdma=rdma or Initiator(),
            puts=PutDigests.of(check_puts, digest_puts),
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

    def refusals(self) -> list[Refusal]:
        """Which living engines share nothing, and why."""
        deadline = Deadline(self.deadline_s)

        def action(channel: Channel) -> list[Refusal]:
            reply = channel.ask(ManifestsReply, _core.encode_manifests(channel.next_id()), deadline)
            return [Refusal(engine, reason) for engine, reason in reply.refusals]

        return self._session.operate(Access.READ, deadline, action)

    def match(self, manifest: Manifest, hashes: bytes) -> Match:
        """How many leading blocks the node has in full, and where."""
        began, most_s = time.monotonic(), self.deadline_s
        reply = self._session.reads.match(manifest, hashes, began, most_s)
        if reply is None:
            reply = long_way.match(self._session, manifest, hashes, Deadline(most_s, 0, began))
        return Match(reply.blocks, tuple(map(Place._make, reply.places)))

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
        began, most_s = time.monotonic(), self.deadline_s
        quick = self._session.puts.put(
            manifest, part, hashes, span, segments, indices, began, most_s
        )
        if quick is not None:
            return quick
        deadline = Deadline(most_s, segments.block_bytes * len(span), began)
        return long_way.put(
            self._session, manifest, part, hashes, span, segments, indices, deadline
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
        began, most_s, verify = time.monotonic(), self.deadline_s, self._verify
        quick = self._session.reads.get(
            manifest, part, hashes, span, segments, indices, verify, began, most_s
        )
        if quick is not None:
            return quick
        deadline = Deadline(most_s, segments.block_bytes * len(span), began)
        return long_way.get_into(
            self._session, manifest, part, hashes, span, segments, indices, verify, deadline
        )

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
