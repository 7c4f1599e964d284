"""Slots of the pool that a client fills and reads itself: shared by shared memory and RDMA.

A put is RESERVE, the copy, COMMIT; a get is ACQUIRE, the copy, RELEASE. The caller supplies the
copy. One that broke the link leaves its slots as they are: the node fences them. Requests raise as
`Channel.ask`; a reply about other blocks than were named is LinkLost too.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from kvrouter_store import _core
from kvrouter_store._core import AcquireReply, BlockStatus, FlagReply, ReserveReply, StatusesReply
from kvrouter_store.client.transports.base import STATUSES, Target, Transfer
from kvrouter_store.connection.channel import Channel
from kvrouter_store.connection.deadline import Deadline
from kvrouter_store.identity.chain import HASH_BYTES

CopyIn = Callable[[Sequence[int], Sequence[int]], Sequence[int]]
"""Copies blocks of these indices to these offsets of the pool; the CRC32C of each."""
CopyOut = Callable[[Sequence[int], Sequence[int], Sequence[int] | None], Sequence[bool]]
"""Copies to these indices from these offsets; whether each is intact, by its CRC32C if given."""
Answered = TypeVar("Answered", ReserveReply, StatusesReply)


def put_reserved(
    channel: Channel, transfer: Transfer, deadline: Deadline, copy_in: CopyIn
) -> list[BlockStatus]:
    """Reserve slots, copy into them, commit. After ValueError or IndexError nothing is kept.

    The node bounds what a client has reserved at a time: blocks that found no room are asked for
    again, as long as some of the others are stored.
    """
    statuses: list[BlockStatus] = []
    while True:
        now = _put_once(channel, rest_of(transfer, len(statuses)), deadline, copy_in)
        done = now.index(BlockStatus.NO_SPACE) if BlockStatus.NO_SPACE in now else len(now)
        if done == len(now) or BlockStatus.STORED not in now:
            return statuses + now
        statuses += now[:done]


def rest_of(transfer: Transfer, done: int) -> Transfer:
    """What is left of it when `done` blocks, fewer than all, are done."""
    if not done:
        return transfer
    at = done * HASH_BYTES
    parent, hashes = transfer.hashes[at - HASH_BYTES : at], transfer.hashes[at:]
    return replace(transfer, parent=parent, hashes=hashes, indices=transfer.indices[done:])


def chosen_hashes(hashes: bytes, chosen: Sequence[int]) -> bytes:
    """The hashes of these blocks."""
    return b"".join(hashes[k * HASH_BYTES : (k + 1) * HASH_BYTES] for k in chosen)


def _put_once(
    channel: Channel, transfer: Transfer, deadline: Deadline, copy_in: CopyIn
) -> list[BlockStatus]:
    reserved = reserve(channel, transfer, deadline)
    statuses = [STATUSES[code] for code in reserved.statuses]
    chosen = [k for k, status in enumerate(statuses) if status is BlockStatus.GRANTED]
    if not chosen:
        return statuses
    hashes, generations = transfer.hashes, reserved.generations
    offsets, indices = reserved.offsets, transfer.indices
    if len(chosen) < len(statuses):
        hashes = chosen_hashes(hashes, chosen)
        generations = [generations[k] for k in chosen]
        offsets = [offsets[k] for k in chosen]
        indices = [indices[k] for k in chosen]
    try:
        crcs = copy_in(indices, offsets)
    except (ValueError, IndexError):
        abort(channel, transfer, deadline, hashes, generations)
        raise
    committed = commit(channel, transfer, deadline, hashes, generations, crcs)
    for k, code in zip(chosen, committed.statuses, strict=True):
        status = STATUSES[code]
        statuses[k] = BlockStatus.STORED if status is BlockStatus.OK else status
    return statuses


def get_leased(
    channel: Channel, transfer: Transfer, deadline: Deadline, copy_out: CopyOut
) -> list[BlockStatus]:
    """Take a lease on the leading run, copy it out, give the lease back."""
    part, hashes = transfer.part, transfer.hashes
    held = acquire(channel, transfer.manifest_id, part, hashes, 1, deadline)
    statuses = [BlockStatus.MISSING] * len(transfer.indices)
    if not held.blocks:
        return statuses
    crcs = held.crcs if transfer.verify else None
    indices = transfer.indices[: held.blocks]
    released = False
    try:
        intact = copy_out(indices, held.offsets, crcs)
    finally:
        if channel.usable:  # else the lease ended with the link
            released = channel.ask(FlagReply, deadline, _core.encode_release, held.lease_id).flag
    if released:
        statuses[: held.blocks] = [
            BlockStatus.OK if good else BlockStatus.CORRUPT for good in intact
        ]
    return statuses


def reserve(channel: Channel, target: Target, deadline: Deadline) -> ReserveReply:
    """Ask for slots to write `target.hashes` into."""
    reply = channel.ask(
        ReserveReply,
        deadline,
        _core.encode_reserve,
        target.manifest_id,
        target.part,
        target.parent,
        target.hashes,
    )
    return _about(channel, reply, target.hashes)


def commit(  # noqa: PLR0917
    channel: Channel,
    target: Target,
    deadline: Deadline,
    hashes: bytes,
    generations: Sequence[int],
    crcs: Sequence[int],
) -> StatusesReply:
    """Make written slots visible."""
    names = target.manifest_id, target.part, hashes
    reply = channel.ask(StatusesReply, deadline, _core.encode_commit, *names, generations, crcs)
    return _about(channel, reply, hashes)


def abort(
    channel: Channel, target: Target, deadline: Deadline, hashes: bytes, generations: Sequence[int]
) -> StatusesReply:
    """Give reserved slots back that nothing writes any more."""
    names = target.manifest_id, target.part, hashes
    reply = channel.ask(StatusesReply, deadline, _core.encode_abort, *names, generations)
    return _about(channel, reply, hashes)


def acquire(  # noqa: PLR0917
    channel: Channel,
    manifest_id: int,
    part: int | None,
    hashes: bytes,
    parts: int,
    deadline: Deadline,
) -> AcquireReply:
    """Take a lease on the leading blocks that the node has: of a part, or of all `parts`."""
    held = channel.ask(AcquireReply, deadline, _core.encode_acquire, manifest_id, part, hashes)
    if held.blocks > len(hashes) // HASH_BYTES or (held.blocks and len(held.part_bytes) != parts):
        channel.lost(ValueError("a lease came on other blocks than were asked for"))
    return held


def _about(channel: Channel, reply: Answered, hashes: bytes) -> Answered:
    if len(reply.statuses) != len(hashes) // HASH_BYTES:
        channel.lost(ValueError("a reply came about other blocks than were asked about"))
    return reply
