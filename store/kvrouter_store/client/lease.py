"""What a client holds at the node: leases on blocks, and reserved slots. Bound to a connection.

It ends when it is released, when its connection breaks, or when the process of the client ends.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from kvrouter_store import _core
from kvrouter_store._core import BlockStatus, FlagReply, LocalLease, ReserveReply, Segments
from kvrouter_store.client.batches import hashes_of
from kvrouter_store.client.executor import Executor
from kvrouter_store.client.transports.base import Target
from kvrouter_store.client.transports.slots import abort, chosen_hashes, commit
from kvrouter_store.connection.channel import Channel, Registration
from kvrouter_store.connection.deadline import Deadline
from kvrouter_store.errors import CorruptBlock, LeaseLost, StoreUnavailable
from kvrouter_store.identity.block import Manifest
from kvrouter_store.identity.chain import HASH_BYTES

if TYPE_CHECKING:
    from kvrouter_store.client.blocking import StoreClient


Read = Callable[[bytes, Segments, Sequence[int]], Sequence[BlockStatus]]
"""Writes the blocks of these hashes to these places of a memory; a status for each."""


class Lease:
    """The first `blocks` blocks are not evicted while this is held. Use as a context manager.

    known: the ids of their manifest, where they were acquired.

    After `release` (or a lost connection) views of it may show other bytes: use none of them
    before the release has returned True.
    """

    def __init__(
        self,
        client: "StoreClient",
        executor: Executor,
        channel: Channel,
        manifest: Manifest,
        hashes: bytes,
        *,
        blocks: int,
        held: int | LocalLease,
        known: Registration,
    ) -> None:
        self.blocks = blocks
        self.known = known
        self._client = client
        self._executor = executor
        self._channel = channel
        self._manifest = manifest
        self._hashes = hashes
        self._pins = held if isinstance(held, LocalLease) else None
        self._lease_id = held if isinstance(held, int) else 0
        self._slots: dict[int, list[tuple[int, int]]] = {}
        self._released = held == 0
        if self._lease_id:
            channel.leases += 1

    def at(self, offsets: Sequence[int], crcs: Sequence[int], parts: Sequence[int]) -> Self:
        """Remember where these parts of each block are in the pool, block by block."""
        if self._channel.pool is not None and self.blocks:
            step = len(parts)
            for k, part in enumerate(parts):
                places = range(k, self.blocks * step, step)
                self._slots[part] = [(offsets[at], crcs[at]) for at in places]
        return self

    def places(self, part: int = 0) -> list[tuple[int, int]]:
        """Of one part of each block, its offset in the pool and its digest; empty if not mapped."""
        return self._slots.get(part, [])

    def is_listed(self, part: int = 0) -> bool:
        """Whether the directory shows all blocks there, so that other processes find them too.

        It has no room for each block of a pool whose blocks are very small.
        """
        directory, offsets = self._channel.directory, [offset for offset, _ in self.places(part)]
        hashes = self._hashes[: len(offsets) * HASH_BYTES]
        try:
            return directory is not None and bool(
                directory.at(self.known.names, part, hashes, offsets)
            )
        except ValueError:  # the connection broke, and took the directory with it
            return False

    @property
    def held(self) -> bool:
        """Whether it is still held, as far as is known without asking."""
        return not self._released and self._channel.alive()

    @property
    def over(self) -> bool:
        """Whether nothing is left to be released."""
        return self._released

    def view(self, index: int, part: int = 0, *, verify: bool = False) -> memoryview:
        """Read-only bytes of one part of block `index`: the pool itself where it is mapped.

        `verify` checks the digest, unless the node has digests off. Without it nothing has checked
        bytes that came through shared memory or RDMA. CorruptBlock if they do not match: the block
        is then deleted. LeaseLost after the release or a lost connection.
        """
        if not 0 <= index < self.blocks:
            raise IndexError(f"the lease is on {self.blocks} blocks, not on block {index}")
        if self._released or not self._channel.usable:
            raise LeaseLost("the lease is no longer held")
        if self._channel.pool is None or part not in self._slots:
            return self._fetch(part, index)
        offset, crc = self._slots[part][index]
        view = memoryview(self._channel.pool.slice(offset, self._manifest.parts[part].block_bytes))
        if verify and self._channel.hello.digests and _core.crc32c(view) != crc:
            self._client.delete(self._manifest, hashes_of(self._hashes, range(index, index + 1)))
            raise CorruptBlock(f"block {index} does not match its digest; it was deleted")
        return view

    def release(self) -> bool:
        """Give the lease back; True if it had been held throughout. Again: False.

        Also False where its connection was busy until the deadline. Then it is not `over`, and can
        be released again.
        """
        if self._released:
            return False
        self._released = True
        if self._pins is not None:
            held = self._channel.alive()
            self._pins.release()
            return held
        if not self._channel.usable:
            return False
        deadline = Deadline(self._client.deadline_s)
        try:
            with self._executor.borrow(self._channel, deadline) as channel:
                channel.leases -= 1  # not before: a wait that takes the channel would hold this up
                return channel.ask(FlagReply, deadline, _core.encode_release, self._lease_id).flag
        except StoreUnavailable:
            self._released = not self._channel.usable  # else it was busy: nothing was asked
            return False

    def _fetch(self, part: int, index: int) -> memoryview:
        """A copy of one part of a block, where there is no mapped pool."""
        size = self._manifest.parts[part].block_bytes
        buffer = bytearray(size)
        segments = Segments.over(buffer, size, writable=True)
        span = range(index, index + 1)
        status = self._client.get_into(self._manifest, part, self._hashes, span, segments, [0])
        if status == [BlockStatus.CORRUPT]:
            raise CorruptBlock(f"block {index} does not match its digest; it was deleted")
        if status != [BlockStatus.OK]:
            raise LeaseLost(f"block {index} cannot be read: {status[0].name}")
        return memoryview(buffer).toreadonly()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass(frozen=True, slots=True)
class Landing:
    """The outcome of a wait. `landed` is False after a time-out; `blocks` are matched now.

    `lease` is held on the awaited blocks, where it was asked for and they landed.
    """

    landed: bool
    blocks: int
    lease: Lease | None = None


class Reservation:
    """Slots of one part that are this client's to write: then `commit`, else `abort`.

    Only over shared memory. As a context manager it aborts what was not committed.
    `statuses[k]` is GRANTED for the blocks that can be written.
    """

    def __init__(
        self,
        executor: Executor,
        channel: Channel,
        target: Target,
        reply: ReserveReply,
        deadline_s: float,
    ) -> None:
        self.statuses = [BlockStatus(code) for code in reply.statuses]
        self._executor = executor
        self._channel = channel
        self._target = target
        self._deadline_s = deadline_s
        granted = [k for k, status in enumerate(self.statuses) if status == BlockStatus.GRANTED]
        self._hashes = chosen_hashes(target.hashes, granted)
        self._offsets = [reply.offsets[k] for k in granted]
        self._generations = [reply.generations[k] for k in granted]
        self._open = True
        channel.leases += 1

    @property
    def granted(self) -> int:
        """How many slots were granted."""
        return len(self._offsets)

    def fill(self, segments: Segments, indices: Sequence[int]) -> list[int]:
        """Copy the blocks at `indices` into the granted slots, in order; what `commit` takes."""
        channel = self._channel
        if not channel.usable or channel.pool is None:
            raise LeaseLost("the connection of the reservation was lost")
        digest = channel.hello.digests
        return _core.gather(channel.pool, segments, indices, self._offsets, digest)

    def receive(self, block_bytes: int, read: Read) -> list[int]:
        """Have `read` write the granted slots themselves; what `commit` takes.

        That is of the leading blocks that are OK. Raises LeaseLost, and what `read` raises.
        """
        channel = self._channel
        if not channel.usable or channel.pool is None:
            raise LeaseLost("the connection of the reservation was lost")
        try:
            mapped = channel.pool.slice(0, channel.pool.size)  # stays until this returns
        except ValueError as error:
            raise LeaseLost("the connection of the reservation was lost") from error
        (base,), granule = Segments.over(mapped, 1).bases, channel.hello.granule_bytes
        memory = Segments([base], [granule], [block_bytes])
        places = [offset // granule for offset in self._offsets]
        came = [status is BlockStatus.OK for status in read(self._hashes, memory, places)]
        places = places[: (*came, False).index(False)]
        return memory.digests(places) if channel.hello.digests else [0] * len(places)

    def commit(self, crcs: Sequence[int]) -> list[BlockStatus]:
        """Make leading granted blocks visible: OK for each, or GONE where the reservation ended.

        `crcs` as `fill` or `receive` returned them, one for each of the blocks; the other slots are
        given back. The node ends a reservation when its connection has asked nothing for the node's
        --reserve-timeout.
        """
        made, names = len(crcs), self._hashes
        target, hashes = self._target, names[: made * HASH_BYTES]
        statuses: Sequence[int] = ()
        with self._ending() as (channel, deadline):
            if made:
                generations = self._generations[:made]
                statuses = commit(channel, target, deadline, hashes, generations, crcs).statuses
            if made < self.granted:
                rest, generations = names[made * HASH_BYTES :], self._generations[made:]
                abort(channel, target, deadline, rest, generations)
        return [BlockStatus(code) for code in statuses]

    def abort(self) -> None:
        """Give the slots back."""
        if not self._open or not self._channel.usable:
            return
        with self._ending() as (channel, deadline):
            if self._offsets:
                abort(channel, self._target, deadline, self._hashes, self._generations)

    @contextlib.contextmanager
    def _ending(self) -> Iterator[tuple[Channel, Deadline]]:
        """Its connection, for its last request."""
        if not self._open:
            raise LeaseLost("the reservation was committed or aborted already")
        deadline = Deadline(self._deadline_s)
        with self._executor.borrow(self._channel, deadline) as channel:
            self._open = False
            channel.leases -= 1
            yield channel, deadline

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(StoreUnavailable):  # the reservation ended with its connection
            self.abort()
