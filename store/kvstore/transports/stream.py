"""A byte stream (Unix socket or TCP): payloads go straight from and into the caller's memory."""

from kvstore import _core
from kvstore._core import BlockStatus, GetReply, StatusesReply
from kvstore.connection import Channel, Deadline
from kvstore.transports.base import STATUSES, Read, Write

__all__ = ["Stream"]


class Stream:
    """Transport over the connection itself: one round trip for many blocks."""

    def put(self, channel: Channel, write: Write, deadline: Deadline) -> list[BlockStatus]:
        """Send the blocks, each with its digest, which the server checks as they come."""
        frame = _core.encode_put(
            channel.next_id(),
            write.manifest_id,
            write.part,
            write.parent,
            write.hashes,
            write.segments.block_bytes,
        )
        channel.pending = True
        try:
            _core.send_from(
                channel.wire, write.segments, write.indices, deadline.left_s(), prefix=frame
            )
        except OSError as error:
            channel.lost(error)
        reply = channel.receive(deadline)
        assert isinstance(reply, StatusesReply)
        return [STATUSES[code] for code in reply.statuses]

    def get_into(self, channel: Channel, read: Read, deadline: Deadline) -> list[BlockStatus]:
        """Ask for the leading run and receive it in place, checking digests on the way."""
        frame = _core.encode_get(channel.next_id(), read.manifest_id, read.part, read.hashes)
        channel.send(frame, deadline)
        reply = channel.receive_before_payload(deadline)
        assert isinstance(reply, GetReply)
        crcs = reply.crcs
        statuses = [BlockStatus.MISSING] * len(read.indices)
        if not crcs:
            return statuses
        found = len(crcs)
        try:
            intact = _core.recv_into(
                channel.wire,
                read.segments,
                read.indices[:found],
                crcs if read.verify else None,
                deadline.left_s(),
            )
        except OSError as error:
            channel.lost(error)
        channel.pending = False
        statuses[:found] = [BlockStatus.OK if good else BlockStatus.CORRUPT for good in intact]
        return statuses
