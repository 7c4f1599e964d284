"""Shared memory: the pool is mapped, and a block copied once; the same pass computes its digest.

A put copies into a slot that the node has lent and posts it; a get copies what the directory shows.
Where that is not possible, a put is RESERVE, copy, COMMIT, and a get ACQUIRE, copy, RELEASE. Only
the mapping of a put is writable. The node keeps the slots of a vanished writer until the fence
shows that it is gone.
"""

from collections.abc import Sequence

from kvrouter_store import _core
from kvrouter_store._core import BlockStatus, LendReply, LocalWriter, PoolView, PostState
from kvrouter_store.client.transports.base import STATUSES, Transfer
from kvrouter_store.client.transports.slots import get_leased, put_reserved, rest_of
from kvrouter_store.connection.channel import Channel
from kvrouter_store.connection.deadline import Deadline
from kvrouter_store.identity.chain import HASH_BYTES

STORED = int(BlockStatus.STORED)


def put(channel: Channel, transfer: Transfer, deadline: Deadline) -> list[BlockStatus]:
    """Post the blocks that have a lent slot; reserve and commit the others."""
    writer = channel.writer
    statuses = _post(channel, writer, transfer, deadline) if writer is not None else []
    if len(statuses) == len(transfer.indices):
        return statuses
    rest = rest_of(transfer, len(statuses))

    def copy_in(indices: Sequence[int], offsets: Sequence[int]) -> Sequence[int]:
        digest = channel.hello.digests
        return _core.gather(_pool(channel), rest.segments, indices, offsets, digest)

    return statuses + put_reserved(channel, rest, deadline, copy_in)


def _post(
    channel: Channel, writer: LocalWriter, transfer: Transfer, deadline: Deadline
) -> list[BlockStatus]:
    """Of the leading blocks. No request unless slots have run out, or a client waits."""
    block_bytes, count = transfer.segments.block_bytes, len(transfer.indices)
    if writer.stock(block_bytes) < count:
        if writer.most(block_bytes) < count:
            return []
        _borrow(channel, writer, transfer, transfer.parent, deadline)
    posted, state = writer.put(
        _pool(channel),
        transfer.names,
        transfer.manifest_id,
        transfer.part,
        transfer.parent,
        transfer.hashes,
        transfer.segments,
        transfer.indices,
        channel.hello.digests,
    )
    if state == PostState.CLOSED:
        channel.lost(ConnectionError("the store closed the connection"))
    if state == PostState.CALLING and STORED in posted:
        end = len(posted) * HASH_BYTES
        _borrow(channel, writer, transfer, transfer.hashes[end - HASH_BYTES : end], deadline)
    return [STATUSES[code] for code in posted]


def get_into(channel: Channel, transfer: Transfer, deadline: Deadline) -> list[BlockStatus]:
    """Copy the leading run that the directory shows; ask the node for the rest."""
    here = 0
    if channel.directory is not None:
        here = channel.directory.read(
            _pool(channel),
            transfer.names,
            transfer.part,
            transfer.hashes,
            transfer.segments,
            transfer.indices,
            transfer.verify,
        )
    statuses = [BlockStatus.OK] * here
    if here == len(transfer.indices):
        return statuses

    def copy_out(
        indices: Sequence[int], offsets: Sequence[int], crcs: Sequence[int] | None
    ) -> Sequence[bool]:
        return _core.scatter(_pool(channel), transfer.segments, indices, offsets, crcs)

    return statuses + get_leased(channel, rest_of(transfer, here), deadline, copy_out)


def _borrow(
    channel: Channel,
    writer: LocalWriter,
    transfer: Transfer,
    parent: bytes | None,
    deadline: Deadline,
) -> None:
    """Have the node lend slots of this part's size. It keeps `parent`, and takes what was posted.

    Until the reply comes nothing is lent: the node may give the former slots to other clients.
    """
    writer.forget()
    names = transfer.manifest_id, transfer.part, parent
    reply = channel.ask(LendReply, deadline, _core.encode_lend, *names)
    writer.lent(transfer.segments.block_bytes, reply.most, reply.offsets, reply.generations)


def _pool(channel: Channel) -> PoolView:
    if channel.pool is None or channel.broken:
        channel.lost(ConnectionError("the mapping of the pool was given up"))
    return channel.pool
