"""RDMA: blocks are written straight into the pool of a node on another host, and read from it.

A put is RESERVE, one-sided writes out of the caller's memory, COMMIT; a get is ACQUIRE, one-sided
reads into the caller's memory, RELEASE. Digests, unless the node has them off, are computed here,
of the caller's memory: before the commit, and after the read. A transfer that failed ends the
connection, so that the node fences what it may still do there; this side is fenced before
anything is raised.
"""

import logging
from collections.abc import Sequence
from contextlib import ExitStack

from kvrouter_store._core import BlockStatus, Segments
from kvrouter_store.client.transports.base import Read, Write
from kvrouter_store.client.transports.slots import get_leased, put_reserved
from kvrouter_store.client.transports.stream import StreamTransport
from kvrouter_store.connection.channel import Channel, Deadline
from kvrouter_store.errors import DeadlineExceeded
from kvrouter_store.rdma.base import RdmaUnavailable, TransferFailed
from kvrouter_store.rdma.initiator import RemotePool
from kvrouter_store.rdma.memory import MemoryKeys

__all__ = ["Rdma"]

log = logging.getLogger(__name__)
STREAM = StreamTransport()


class Rdma:
    """Transport over an attached connection. Memory that cannot be registered is streamed."""

    def put(self, channel: Channel, write: Write, deadline: Deadline) -> list[BlockStatus]:
        """Reserve slots, write them, commit them when all of it was acknowledged."""
        remote, segments = _remote(channel), write.segments
        segments.pieces(write.indices)  # an index outside of them is found before anything is asked
        with ExitStack() as stack:
            keys = _keys(stack, remote, segments, write.indices)
            if keys is None:
                return STREAM.put(channel, write, deadline)

            def copy_in(indices: Sequence[int], offsets: Sequence[int]) -> Sequence[int]:
                try:
                    remote.write(keys, segments, indices, offsets, deadline)
                except (TransferFailed, DeadlineExceeded) as error:
                    channel.lost(error)
                return segments.digests(indices) if channel.hello.digests else [0] * len(indices)

            return put_reserved(channel, write, deadline, copy_in)

    def get_into(self, channel: Channel, read: Read, deadline: Deadline) -> list[BlockStatus]:
        """Lease the leading run, read it, and check its digests where it has come to."""
        remote, segments = _remote(channel), read.segments
        if not segments.writable:
            raise ValueError("the segments are not writable")
        segments.pieces(read.indices)
        with ExitStack() as stack:
            keys = _keys(stack, remote, segments, read.indices)
            if keys is None:
                return STREAM.get_into(channel, read, deadline)

            def copy_out(
                indices: Sequence[int], offsets: Sequence[int], crcs: Sequence[int] | None
            ) -> Sequence[bool]:
                try:
                    remote.read(keys, segments, indices, offsets, deadline)
                except (TransferFailed, DeadlineExceeded) as error:
                    channel.lost(error)
                if crcs is None:
                    return [True] * len(indices)
                found = segments.digests(indices)
                return [one == wanted for one, wanted in zip(found, crcs, strict=True)]

            return get_leased(channel, read, deadline, copy_out)


def _remote(channel: Channel) -> RemotePool:
    if not isinstance(channel.remote, RemotePool) or channel.broken:
        channel.lost(ConnectionError("the queue pair was given up"))
    return channel.remote


def _keys(
    stack: ExitStack, remote: RemotePool, segments: Segments, indices: Sequence[int]
) -> MemoryKeys | None:
    """The keys of this memory until the stack ends; None where it may not be registered."""
    try:
        return stack.enter_context(remote.memory.held(segments, indices))
    except RdmaUnavailable as error:
        log.warning("these blocks go over the connection itself: %s", error)
        return None
