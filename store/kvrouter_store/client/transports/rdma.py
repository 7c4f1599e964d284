"""RDMA: blocks are written straight into the pool of a node on another host, and read from it.

A put is RESERVE, one-sided writes out of the caller's memory, COMMIT; a get is ACQUIRE, one-sided
reads into the caller's memory, RELEASE. Digests, unless the node has them off, are computed here,
of the caller's memory: before the commit, and after the read. A transfer that failed ends the
connection, so that the node fences what it may still do there; this side is fenced before anything
is raised.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from kvrouter_store._core import BlockStatus
from kvrouter_store.client.transports import stream
from kvrouter_store.client.transports.base import Transfer
from kvrouter_store.client.transports.slots import get_leased, put_reserved
from kvrouter_store.connection.channel import Channel
from kvrouter_store.connection.deadline import Deadline
from kvrouter_store.errors import DeadlineExceeded
from kvrouter_store.rdma.base import RdmaUnavailable, TransferFailed
from kvrouter_store.rdma.initiator import RemotePool
from kvrouter_store.rdma.memory import MemoryKeys

log = logging.getLogger(__name__)


def put(channel: Channel, transfer: Transfer, deadline: Deadline) -> list[BlockStatus]:
    """Reserve slots, write them, commit them when all of it was acknowledged."""
    with _registered(channel, transfer) as (remote, keys):
        if keys is None:
            return stream.put(channel, transfer, deadline)
        segments = transfer.segments

        def copy_in(indices: Sequence[int], offsets: Sequence[int]) -> Sequence[int]:
            with _ending(channel):
                remote.write(remote.copies(keys, segments, indices, offsets), deadline)
            return segments.digests(indices) if channel.hello.digests else [0] * len(indices)

        return put_reserved(channel, transfer, deadline, copy_in)


def get_into(channel: Channel, transfer: Transfer, deadline: Deadline) -> list[BlockStatus]:
    """Lease the leading run, read it, and check its digests where it has come to."""
    if not transfer.segments.writable:
        raise ValueError("the segments are not writable")
    with _registered(channel, transfer) as (remote, keys):
        if keys is None:
            return stream.get_into(channel, transfer, deadline)
        segments = transfer.segments

        def copy_out(
            indices: Sequence[int], offsets: Sequence[int], crcs: Sequence[int] | None
        ) -> Sequence[bool]:
            with _ending(channel):
                remote.read(remote.copies(keys, segments, indices, offsets), deadline)
            if crcs is None:
                return [True] * len(indices)
            found = segments.digests(indices)
            return [one == wanted for one, wanted in zip(found, crcs, strict=True)]

        return get_leased(channel, transfer, deadline, copy_out)


@contextmanager
def _registered(
    channel: Channel, transfer: Transfer
) -> Iterator[tuple[RemotePool, MemoryKeys | None]]:
    """The node's pool, and the keys of the caller's memory; None where it may not be registered."""
    if not isinstance(channel.remote, RemotePool) or channel.broken:
        channel.lost(ConnectionError("the queue pair was given up"))
    remote, segments = channel.remote, transfer.segments
    segments.pieces(transfer.indices)  # finds an index outside of them before anything is asked
    keys = None
    with ExitStack() as stack:
        try:
            keys = stack.enter_context(remote.memory.held(segments, transfer.indices))
        except RdmaUnavailable as error:
            log.warning("these blocks go over the connection itself: %s", error)
        yield remote, keys


@contextmanager
def _ending(channel: Channel) -> Iterator[None]:
    """A transfer that fails ends the connection."""
    try:
        yield
    except (TransferFailed, DeadlineExceeded) as error:
        channel.lost(error)
