"""What a client holds at the server: leases on blocks, and reserved slots. Bound to a connection.

Whatever is held ends when it is released, when its connection breaks, or when its process dies.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from kvrouter_store import _core
from kvrouter_store._core import BlockStatus, FlagReply, LocalLease, ReserveReply, Segments
from kvrouter_store.client.channel_pool import ChannelPool
from kvrouter_store.client.transports.base import Target
from kvrouter_store.client.transports.slots import abort, commit
from kvrouter_store.connection.channel import Channel, Deadline
from kvrouter_store.errors import CorruptBlock, LeaseLost, StoreUnavailable

__all__ = ["Landing", "Lease", "LeaseSource", "Reservation"]

HASH_BYTES = 32


class LeaseSource(Protocol):
    """What a lease asks of the client that took it."""

    deadline_s: float

    def part_bytes(self, part: int) -> int:
        """Bytes of one part of a block."""
        ...

    def fetch(self, part: int, index: int) -> memoryview:
        """The bytes of one leased block by a get: where there is no mapped pool."""
        ...

    def discard(self, index: int) -> None:
        """Delete a block that turned out corrupt."""
        ...


class Lease:
    """The first `blocks` blocks will not be evicted while this is held. Use as a context manager.

    After `release` (or a lost connection) views of it may show other bytes: use none of them
    before the release has returned True.
    """

    def __init__(
        self,
        blocks: int,
        held: int | LocalLease,
        source: LeaseSource,
        lane: ChannelPool,
        channel: Channel,
    ):
        self.blocks = blocks
        self._pins = held if isinstance(held, LocalLease) else None
        self._lease_id = held if isinstance(held, int) else 0
        self._source = source
        self._lane = lane
        self._channel = channel
        self._slots: dict[int, list[tuple[int, int]]] = {}
        self._released = held == 0
        if self._lease_id:
            channel.leases += 1

    def at(self, offsets: Sequence[int], crcs: Sequence[int], parts: Sequence[int]) -> Self:
        """Remember where these parts of each block lie in the pool, block by block."""
        if self._channel.pool is not None and self.blocks:
            step = len(parts)
            for k, part in enumerate(parts):
                places = range(k, self.blocks * step, step)
                self._slots[part] = [(offsets[at], crcs[at]) for at in places]
        return self

    @property
    def held(self) -> bool:
        """Whether it is still held, as far as is known without asking."""
        return not self._released and self._channel.alive()

    def view(self, index: int, part: int = 0, *, verify: bool = False) -> memoryview:
        """Read-only bytes of one part of block `index`: the pool itself where it is mapped.

        Its digest was computed of these very bytes when they came, and nobody changes them since;
        with `verify` they are read through and checked again (not where the node has digests off).
        CorruptBlock where they do not match (the block is then deleted). LeaseLost after the
        release or a lost connection.
        """
        if not 0 <= index < self.blocks:
            raise IndexError(f"the lease is on {self.blocks} blocks, not on block {index}")
        if self._released or not self._channel.usable:
            raise LeaseLost("the lease is no longer held")
        if self._channel.pool is None or part not in self._slots:
            return self._source.fetch(part, index)
        offset, crc = self._slots[part][index]
        view = memoryview(self._channel.pool.slice(offset, self._source.part_bytes(part)))
        if verify and self._channel.hello.digests and _core.crc32c(view) != crc:
            self._source.discard(index)
            raise CorruptBlock(f"block {index} does not match its digest; it was deleted")
        return view

    def release(self) -> bool:
        """Give the lease back; True if it had been held throughout. Again: False."""
        if self._released:
            return False
        self._released = True
        if self._pins is not None:
            held = self._channel.alive()
            self._pins.release()
            return held
        self._channel.leases -= 1
        if not self._channel.usable:
            return False
        deadline = Deadline(self._source.deadline_s)
        try:
            with self._lane.this(self._channel, deadline) as channel:
                frame = _core.encode_release(channel.next_id(), self._lease_id)
                return channel.ask(FlagReply, frame, deadline).flag
        except StoreUnavailable:
            return False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.release()


@dataclass(frozen=True, slots=True)
class Landing:
    """The outcome of a wait. `landed` is False after a time-out; `blocks` are matched now.

    `lease` is held on the blocks that were waited for, where it was asked for and they landed.
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
        lane: ChannelPool,
        channel: Channel,
        target: Target,
        reply: ReserveReply,
        deadline_s: float,
    ) -> None:
        self.statuses = [BlockStatus(code) for code in reply.statuses]
        self._lane = lane
        self._channel = channel
        self._target = target
        self._deadline_s = deadline_s
        granted = [k for k, status in enumerate(self.statuses) if status == BlockStatus.GRANTED]
        self._hashes = b"".join(
            target.hashes[k * HASH_BYTES : (k + 1) * HASH_BYTES] for k in granted
        )
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

    def commit(self, crcs: Sequence[int]) -> list[BlockStatus]:
        """Make the granted blocks visible: OK for each, or GONE where the reservation has ended.

        `crcs` as `fill` returned them. The node ends it when nothing was asked on its connection
        for the node's --reserve-timeout.
        """
        deadline = self._close()
        with self._lane.this(self._channel, deadline) as channel:
            reply = commit(
                channel, self._target, self._hashes, self._generations, crcs, deadline=deadline
            )
        return [BlockStatus(code) for code in reply.statuses]

    def abort(self) -> None:
        """Give the slots back."""
        if not self._open:
            return
        deadline = self._close()
        if not self._channel.usable or not self._offsets:
            return
        with self._lane.this(self._channel, deadline) as channel:
            abort(channel, self._target, self._hashes, self._generations, deadline)

    def _close(self) -> Deadline:
        if not self._open:
            raise LeaseLost("the reservation was committed or aborted already")
        self._open = False
        self._channel.leases -= 1
        return Deadline(self._deadline_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        with contextlib.suppress(StoreUnavailable):  # with the connection went the reservation
            self.abort()
