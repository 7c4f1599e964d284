"""Shared memory: the pool is mapped, a block is copied once, its digest computed in the same pass.

A put is a copy into a slot that the server has lent, and a note of it; a get is a copy of what the
directory tells of. Where that does not do, a put is RESERVE, copy, COMMIT, and a get ACQUIRE, copy,
RELEASE. Only the mapping of a put is writable, and its server keeps the slots of a vanished writer
until the fence says that it is gone.
"""

from collections.abc import Sequence
from dataclasses import replace

from kvrouter_store import _core
from kvrouter_store._core import BlockStatus, LendReply, LocalWriter, PoolView, PostState
from kvrouter_store.client.transports.base import STATUSES, Read, Write
from kvrouter_store.client.transports.slots import HASH_BYTES, get_leased, put_reserved, rest_of
from kvrouter_store.connection.channel import Channel, Deadline

__all__ = ["SharedMemory"]

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
        write = rest_of(write, done)

        def copy_in(indices: Sequence[int], offsets: Sequence[int]) -> Sequence[int]:
            return _core.gather(
                _pool(channel), write.segments, indices, offsets, channel.hello.digests
            )

        return statuses + put_reserved(channel, write, deadline, copy_in)

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
            channel.hello.digests,
        )
        if state == PostState.CLOSED:
            channel.lost(ConnectionError("the store closed the connection"))
        if state == PostState.CALLING and STORED in posted:
            end = len(posted) * HASH_BYTES
            _borrow(channel, writer, write, write.hashes[end - HASH_BYTES : end], deadline)
        return [STATUSES[code] for code in posted]

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

        def copy_out(
            indices: Sequence[int], offsets: Sequence[int], crcs: Sequence[int] | None
        ) -> Sequence[bool]:
            return _core.scatter(_pool(channel), read.segments, indices, offsets, crcs)

        return statuses + get_leased(channel, rest, deadline, copy_out)


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
