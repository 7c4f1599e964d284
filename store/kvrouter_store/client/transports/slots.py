"""Slots of the pool that a client fills and reads by itself: what shared memory and RDMA share.

A put is RESERVE, the copy, COMMIT; a get ACQUIRE, the copy, RELEASE. How bytes are copied is the
caller's. A copy that broke the link leaves its slots as they are: the server fences them. Requests
raise as `Channel.ask`; a reply about other blocks than were named is LinkLost too.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from kvrouter_store import _core
from kvrouter_store._core import AcquireReply, BlockStatus, FlagReply, ReserveReply, StatusesReply
from kvrouter_store.client.transports.base import STATUSES, Read, Target, Write
from kvrouter_store.connection.channel import Channel, Deadline

__all__ = [
    "HASH_BYTES",
    "CopyIn",
    "CopyOut",
    "abort",
    "acquire",
    "commit",
    "get_leased",
    "put_reserved",
    "reserve",
    "rest_of",
]

HASH_BYTES = 32
CopyIn = Callable[[Sequence[int], Sequence[int]], Sequence[int]]
"""Copies blocks of these indices to these offsets of the pool; the CRC32C of each."""
CopyOut = Callable[[Sequence[int], Sequence[int], Sequence[int] | None], Sequence[bool]]
"""Copies to these indices from these offsets; whether each is intact, by its CRC32C if given."""
Answered = TypeVar("Answered", ReserveReply, StatusesReply)


def put_reserved(
    channel: Channel, write: Write, deadline: Deadline, copy_in: CopyIn
) -> list[BlockStatus]:
    """Reserve slots, copy into them, commit. After ValueError or IndexError nothing is kept.

    The store bounds what a client has reserved at a time: what found no room is asked for again
    while each time some of it is stored.
    """
    statuses: list[BlockStatus] = []
    while True:
        now = _put_once(channel, rest_of(write, len(statuses)), deadline, copy_in)
        done = now.index(BlockStatus.NO_SPACE) if BlockStatus.NO_SPACE in now else len(now)
        if done == len(now) or BlockStatus.STORED not in now:
            return statuses + now
        statuses += now[:done]


def rest_of(write: Write, done: int) -> Write:
    """What is left of it when so many blocks, fewer than all, are done."""
    if not done:
        return write
    at = done * HASH_BYTES
    parent, hashes = write.hashes[at - HASH_BYTES : at], write.hashes[at:]
    return replace(write, parent=parent, hashes=hashes, indices=write.indices[done:])


def _put_once(
    channel: Channel, write: Write, deadline: Deadline, copy_in: CopyIn
) -> list[BlockStatus]:
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
        crcs = copy_in(indices, offsets)
    except (ValueError, IndexError):
        abort(channel, write, hashes, generations, deadline)
        raise
    committed = commit(channel, write, hashes, generations, crcs, deadline=deadline)
    for k, code in zip(chosen, committed.statuses, strict=True):
        status = STATUSES[code]
        statuses[k] = BlockStatus.STORED if status is BlockStatus.OK else status
    return statuses


def get_leased(
    channel: Channel, read: Read, deadline: Deadline, copy_out: CopyOut
) -> list[BlockStatus]:
    """Take a lease on the leading run, copy it out, give the lease back."""
    held = acquire(channel, read.manifest_id, read.part, read.hashes, 1, deadline=deadline)
    statuses = [BlockStatus.MISSING] * len(read.indices)
    if not held.blocks:
        return statuses
    crcs = held.crcs if read.verify else None
    indices = read.indices[: held.blocks]
    released = False
    try:
        intact = copy_out(indices, held.offsets, crcs)
    finally:
        if channel.usable:  # else the lease went with the link
            frame = _core.encode_release(channel.next_id(), held.lease_id)
            released = channel.ask(FlagReply, frame, deadline).flag
    if released:
        statuses[: held.blocks] = [
            BlockStatus.OK if good else BlockStatus.CORRUPT for good in intact
        ]
    return statuses


def reserve(channel: Channel, target: Target, deadline: Deadline) -> ReserveReply:
    """Ask for slots to write `target.hashes` into."""
    frame = _core.encode_reserve(
        channel.next_id(), target.manifest_id, target.part, target.parent, target.hashes
    )
    return _of_each(channel, channel.ask(ReserveReply, frame, deadline), target.hashes)


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
    return _of_each(channel, channel.ask(StatusesReply, frame, deadline), hashes)


def abort(
    channel: Channel, target: Target, hashes: bytes, generations: Sequence[int], deadline: Deadline
) -> StatusesReply:
    """Give reserved slots back, to which nothing is on its way."""
    frame = _core.encode_abort(
        channel.next_id(), target.manifest_id, target.part, hashes, generations
    )
    return _of_each(channel, channel.ask(StatusesReply, frame, deadline), hashes)


def acquire(
    channel: Channel,
    manifest_id: int,
    part: int | None,
    hashes: bytes,
    parts: int,
    *,
    deadline: Deadline,
) -> AcquireReply:
    """Take a lease on the leading blocks that the node has: of a part, or of all `parts`."""
    frame = _core.encode_acquire(channel.next_id(), manifest_id, part, hashes)
    held = channel.ask(AcquireReply, frame, deadline)
    if held.blocks > len(hashes) // HASH_BYTES or (held.blocks and len(held.part_bytes) != parts):
        channel.lost(ValueError("a lease came on other blocks than were asked for"))
    return held


def _of_each(channel: Channel, reply: Answered, hashes: bytes) -> Answered:
    if len(reply.statuses) != len(hashes) // HASH_BYTES:
        channel.lost(ValueError("a reply came about other blocks than were asked about"))
    return reply
