"""Shared memory: the pool is mapped, a block is copied once, its digest computed in the same pass.

A put is a copy into a slot that the server has lent, and a note of it; a get is a copy of what the
directory tells of. Where that does not do, a put is RESERVE, copy, COMMIT, and a get ACQUIRE, copy,
RELEASE. Only the mapping of a put is writable, and its server keeps the slots of a vanished writer
until the fence says that it is gone.
"""

from collections.abc import Sequence
from dataclasses import replace

from kvstore import _core
from kvstore._core import (
    AcquireReply,
    BlockStatus,
    FlagReply,
    LendReply,
    LocalWriter,
    PoolView,
    PostState,
    ReserveReply,
    StatusesReply,
)
from kvstore.connection import Channel, Deadline
from kvstore.transports.base import STATUSES, Read, Target, Write

__all__ = ["SharedMemory"]

HASH_BYTES = 32
STORED = int(BlockStatus.STORED)


class SharedMemory:
    """Transport over the mapped pool of a server on this host."""

    def put(self, channel: Channel, write: Write, deadline: Deadline) -> list[BlockStatus]:
        """Post what there are lent slots for; reserve and commit what there are none for."""
        writer = channel.writer
        statuses = self._post(channel, writer, write, deadline) if writer is not None else []
        done = len(statuses)
        if done == len(write.indices):
            return statuses
        if done:
            at = done * HASH_BYTES
            parent, hashes = write.hashes[at - HASH_BYTES : at], write.hashes[at:]
            write = replace(write, parent=parent, hashes=hashes, indices=write.indices[done:])
        return statuses + self._put_reserved(channel, write, deadline)

    def _post(
        self, channel: Channel, writer: LocalWriter, write: Write, deadline: Deadline
    ) -> list[BlockStatus]:
        """Of the leading blocks. No request unless slots have run out, or somebody waits."""
        block_bytes, count = write.segments.block_bytes, len(write.indices)
        if writer.stock(block_bytes) < count:
            if writer.most(block_bytes) < count:
                return []
            _borrow(channel, writer, write, write.parent, deadline)
        posted, state = writer.put(
            _pool(channel),
            write.names,
            write.manifest_id,
            write.part,
            write.parent,
            write.hashes,
            write.segments,
            write.indices,
        )
        if state == PostState.CLOSED:
            channel.lost(ConnectionError("the store closed the connection"))
        if state == PostState.CALLING and STORED in posted:
            end = len(posted) * HASH_BYTES
            _borrow(channel, writer, write, write.hashes[end - HASH_BYTES : end], deadline)
        return [STATUSES[code] for code in posted]

    def _put_reserved(
        self, channel: Channel, write: Write, deadline: Deadline
    ) -> list[BlockStatus]:
        """Reserve slots, copy into them, commit."""
        reserved = reserve(channel, write, deadline)
        statuses = [STATUSES[code] for code in reserved.statuses]
        chosen = [k for k, status in enumerate(statuses) if status is BlockStatus.GRANTED]
        if not chosen:
            return statuses
        hashes, generations = write.hashes, reserved.generations
        offsets, indices = reserved.offsets, write.indices
        if len(chosen) < len(statuses):
            hashes = b"".join(hashes[k * HASH_BYTES : (k + 1) * HASH_BYTES] for k in chosen)
            generations = [generations[k] for k in chosen]
            offsets = [offsets[k] for k in chosen]
            indices = [indices[k] for k in chosen]
        try:
            crcs = _core.gather(_pool(channel), write.segments, indices, offsets)
        except (ValueError, IndexError):
            abort(channel, write, hashes, generations, deadline)
            raise
        committed = commit(channel, write, hashes, generations, crcs, deadline=deadline)
        for k, code in zip(chosen, committed.statuses, strict=True):
            status = STATUSES[code]
            statuses[k] = BlockStatus.STORED if status is BlockStatus.OK else status
        return statuses

    def get_into(self, channel: Channel, read: Read, deadline: Deadline) -> list[BlockStatus]:
        """Copy the leading run that the directory tells of; ask for what it does not."""
        here = 0
        if channel.directory is not None:
            here = channel.directory.read(
                _pool(channel),
                read.names,
                read.part,
                read.hashes,
                read.segments,
                read.indices,
                read.verify,
            )
        statuses = [BlockStatus.OK] * here
        if here == len(read.indices):
            return statuses
        rest = replace(read, hashes=read.hashes[here * HASH_BYTES :], indices=read.indices[here:])
        return statuses + self._get_leased(channel, rest, deadline)

    def _get_leased(self, channel: Channel, read: Read, deadline: Deadline) -> list[BlockStatus]:
        """Take a lease on the leading run, copy it out, give the lease back."""
        frame = _core.encode_acquire(channel.next_id(), read.manifest_id, read.part, read.hashes)
        held = channel.ask(AcquireReply, frame, deadline)
        statuses = [BlockStatus.MISSING] * len(read.indices)
        if not held.blocks:
            return statuses
        crcs = held.crcs if read.verify else None
        indices = read.indices[: held.blocks]
        try:
            intact = _core.scatter(_pool(channel), read.segments, indices, held.offsets, crcs)
        finally:
            frame = _core.encode_release(channel.next_id(), held.lease_id)
            released = channel.ask(FlagReply, frame, deadline)
        if released.flag:
            statuses[: held.blocks] = [
                BlockStatus.OK if good else BlockStatus.CORRUPT for good in intact
            ]
        return statuses


def reserve(channel: Channel, target: Target, deadline: Deadline) -> ReserveReply:
    """Ask for slots to write `target.hashes` into."""
    frame = _core.encode_reserve(
        channel.next_id(), target.manifest_id, target.part, target.parent, target.hashes
    )
    return channel.ask(ReserveReply, frame, deadline)


def commit(
    channel: Channel,
    target: Target,
    hashes: bytes,
    generations: Sequence[int],
    crcs: Sequence[int],
    *,
    deadline: Deadline,
) -> StatusesReply:
    """Make written slots visible."""
    frame = _core.encode_commit(
        channel.next_id(), target.manifest_id, target.part, hashes, generations, crcs
    )
    return channel.ask(StatusesReply, frame, deadline)


def abort(
    channel: Channel, target: Target, hashes: bytes, generations: Sequence[int], deadline: Deadline
) -> StatusesReply:
    """Give reserved slots back."""
    frame = _core.encode_abort(
        channel.next_id(), target.manifest_id, target.part, hashes, generations
    )
    return channel.ask(StatusesReply, frame, deadline)


def _borrow(
    channel: Channel, writer: LocalWriter, write: Write, parent: bytes | None, deadline: Deadline
) -> None:
    """Have slots lent for parts as large as this one, `parent` kept; what was posted is taken."""
    # Until the answer says so, nothing is lent: the server may give what was to others.
    writer.forget()
    frame = _core.encode_lend(channel.next_id(), write.manifest_id, write.part, parent)
    reply = channel.ask(LendReply, frame, deadline)
    writer.lent(write.segments.block_bytes, reply.most, reply.offsets, reply.generations)


def _pool(channel: Channel) -> PoolView:
    if channel.pool is None or channel.broken:
        channel.lost(ConnectionError("the mapping of the pool was given up"))
    return channel.pool
