"""A byte stream (Unix socket or TCP): payloads go straight from and into the caller's memory."""

from kvstore._core import BlockStatus
from kvstore.connection import Channel, Deadline
from kvstore.errors import StoreRefused
from kvstore.transports.base import Read, Write

__all__ = ["Stream"]


class Stream:
    """Transport over the connection itself: one round trip for many blocks."""

    def put(self, channel: Channel, write: Write, deadline: Deadline) -> list[BlockStatus]:
        """Send the blocks; who computes and checks their digests, the channel has agreed upon."""
        try:
            return channel.exchange(
                channel.link.put,
                write.manifest_id,
                write.part,
                write.parent,
                write.hashes,
                write.segments,
                write.indices,
                deadline.at,
            )
        except StoreRefused:
            channel.close()  # the server reads nothing more of a PUT that it refused, nor after it
            raise

    def get_into(self, channel: Channel, read: Read, deadline: Deadline) -> list[BlockStatus]:
        """Ask for the leading run and receive it in place, checking digests on the way."""
        return channel.exchange(
            channel.link.get,
            read.manifest_id,
            read.part,
            read.hashes,
            read.segments,
            read.indices,
            read.verify,
            deadline.at,
        )
