"""A byte stream (Unix socket or TCP): payloads go straight from and into the caller's memory."""

from kvrouter_store._core import BlockStatus
from kvrouter_store.client.transports.base import Read, Write
from kvrouter_store.connection.channel import Channel, Deadline
from kvrouter_store.errors import StoreRefused

__all__ = ["StreamTransport"]


class StreamTransport:
    """Transport over the connection itself: one round trip for many blocks."""

    def put(self, channel: Channel, write: Write, deadline: Deadline) -> list[BlockStatus]:
        """Send the blocks, with their digests unless the node has them off."""
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
