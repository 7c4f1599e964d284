"""How the bytes of blocks travel between an engine's memory and the store's pool."""

from kvstore.connection import Channel
from kvstore.transports.base import Transport
from kvstore.transports.rdma import Rdma
from kvstore.transports.shm import SharedMemory
from kvstore.transports.stream import Stream

__all__ = ["transport_of"]

SHARED_MEMORY = SharedMemory()
RDMA = Rdma()
STREAM = Stream()


def transport_of(channel: Channel) -> Transport:
    """Shared memory or RDMA where the channel has the pool so, else the channel itself."""
    if channel.pool is not None:
        return SHARED_MEMORY
    return STREAM if channel.remote is None else RDMA
