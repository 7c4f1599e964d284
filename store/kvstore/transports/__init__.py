"""How the bytes of blocks travel between an engine's memory and the store's pool."""

from kvstore.connection import Channel
from kvstore.transports.base import Transport
from kvstore.transports.shm import SharedMemory
from kvstore.transports.stream import Stream

__all__ = ["transport_of"]

SHARED_MEMORY = SharedMemory()
STREAM = Stream()


def transport_of(channel: Channel) -> Transport:
    """Shared memory where the channel has a mapping of the pool, else the channel itself."""
    return STREAM if channel.pool is None else SHARED_MEMORY
