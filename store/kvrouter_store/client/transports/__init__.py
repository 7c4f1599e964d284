"""How the bytes of blocks travel between an engine's memory and the store's pool."""

from kvrouter_store.client.transports.base import Transport
from kvrouter_store.client.transports.rdma import Rdma
from kvrouter_store.client.transports.shm import SharedMemory
from kvrouter_store.client.transports.stream import StreamTransport
from kvrouter_store.connection.channel import Channel

SHARED_MEMORY = SharedMemory()
RDMA = Rdma()
STREAM = StreamTransport()


def transport_of(channel: Channel) -> Transport:
    """Shared memory or RDMA where the channel has the pool so, else the channel itself."""
    if channel.pool is not None:
        return SHARED_MEMORY
    return STREAM if channel.remote is None else RDMA
