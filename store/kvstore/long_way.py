"""The long way of a put, get or match: of any number of blocks, on whichever connection."""

import functools
from collections.abc import Callable, Sequence

from kvstore import _core
from kvstore._core import BlockStatus, CountReply, MatchReply, Segments
from kvstore.answers import PutResult
from kvstore.block import Manifest
from kvstore.connection import Access, Channel, Deadline
from kvstore.session import Session
from kvstore.spans import batches, check_span, hashes_of, one_batch, parent_of
from kvstore.transports import transport_of
from kvstore.transports.base import Read, Write

__all__ = ["get_into", "match", "put"]


def put(  # noqa: PLR0917
    session: Session,
    manifest: Manifest,
    part: int,
    hashes: bytes,
    span: range,
    segments: Segments,
    indices: Sequence[int],
    deadline: Deadline,
) -> PutResult:
    """As StoreClient's."""
    check_span(manifest, part, hashes, span, segments, indices)

    def move(batch: range, chosen: Sequence[int], channel: Channel) -> list[BlockStatus]:
        known = session.registry.known(channel, manifest, deadline)
        parent, moved = parent_of(hashes, batch), hashes_of(hashes, batch)
        write = Write(known.manifest_id, part, parent, moved, known.names, segments, chosen)
        statuses = transport_of(channel).put(channel, write, deadline)
        session.went_well(Access.WRITE, channel, manifest, known)
        return statuses

    operate = functools.partial(session.operate, Access.WRITE, deadline)
    memory = (segments.block_bytes, indices)
    return PutResult(tuple(_moved(operate, move, span, memory, BlockStatus.NO_SPACE)))


def get_into(  # noqa: PLR0917
    session: Session,
    manifest: Manifest,
    part: int,
    hashes: bytes,
    span: range,
    segments: Segments,
    indices: Sequence[int],
    verify: bool,
    deadline: Deadline,
) -> list[BlockStatus]:
    """As StoreClient's."""
    check_span(manifest, part, hashes, span, segments, indices)

    def move(batch: range, chosen: Sequence[int], channel: Channel) -> list[BlockStatus]:
        known = session.registry.known(channel, manifest, deadline)
        moved = hashes_of(hashes, batch)
        read = Read(known.manifest_id, known.names, part, moved, segments, chosen, verify)
        statuses = transport_of(channel).get_into(channel, read, deadline)
        if BlockStatus.CORRUPT in statuses:
            _forget_corrupt(channel, read, statuses, deadline)
        session.went_well(Access.READ, channel, manifest, known)
        return statuses

    operate = functools.partial(session.operate, Access.READ, deadline)
    memory = (segments.block_bytes, indices)
    return _moved(operate, move, span, memory, BlockStatus.MISSING)


def match(session: Session, manifest: Manifest, hashes: bytes, deadline: Deadline) -> MatchReply:
    """As StoreClient's, as the node tells it: which is asked, whatever can be seen without."""

    def action(channel: Channel) -> MatchReply:
        known = session.registry.known(channel, manifest, deadline)
        frame = _core.encode_match(channel.next_id(), known.manifest_id, hashes)
        reply = channel.ask(MatchReply, frame, deadline)
        session.went_well(Access.READ, channel, manifest, known)
        return reply

    return session.operate(Access.READ, deadline, action)


def _moved(
    operate: Callable[[Callable[[Channel], list[BlockStatus]]], list[BlockStatus]],
    move: Callable[[range, Sequence[int], Channel], list[BlockStatus]],
    span: range,
    memory: tuple[int, Sequence[int]],
    last: BlockStatus,
) -> list[BlockStatus]:
    """Let `move` do the span, batch by batch: what follows a status `last` is alike."""
    block_bytes, indices = memory
    if one_batch(span, block_bytes):
        return operate(functools.partial(move, span, indices))
    statuses: list[BlockStatus] = []
    for batch in batches(span, block_bytes):
        first = batch.start - span.start
        statuses += operate(functools.partial(move, batch, indices[first : first + len(batch)]))
        if statuses[-1] == last:
            break
    return statuses + [last] * (len(span) - len(statuses))


def _forget_corrupt(
    channel: Channel, read: Read, statuses: list[BlockStatus], deadline: Deadline
) -> None:
    corrupt = [k for k, status in enumerate(statuses) if status == BlockStatus.CORRUPT]
    doomed = b"".join(hashes_of(read.hashes, range(k, k + 1)) for k in corrupt)
    frame = _core.encode_delete(channel.next_id(), read.manifest_id, doomed)
    channel.ask(CountReply, frame, deadline)
