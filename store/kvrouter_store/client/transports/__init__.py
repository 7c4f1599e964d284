"""How the bytes of blocks travel between an engine's memory and the store's pool.

Both calls take the channel for themselves, end by the deadline and leave nothing reserved or leased
at the node. After LinkLost or DeadlineExceeded the channel is of no more use.
"""

from kvrouter_store._core import BlockStatus
from kvrouter_store.client.transports import rdma, shm, stream
from kvrouter_store.client.transports.base import Transfer
from kvrouter_store.connection.channel import Channel
from kvrouter_store.connection.deadline import Deadline


def put(channel: Channel, transfer: Transfer, deadline: Deadline) -> list[BlockStatus]:
    """Store the blocks; a status for each (see PutResult). Nothing is visible half-written."""
    if channel.pool is not None:
        return shm.put(channel, transfer, deadline)
    if channel.remote is not None:
        return rdma.put(channel, transfer, deadline)
    return stream.put(channel, transfer, deadline)


def get_into(channel: Channel, transfer: Transfer, deadline: Deadline) -> list[BlockStatus]:
    """Read the leading run of blocks that the store has: OK, CORRUPT or MISSING for each.

    The caller's memory of a block that is not OK holds anything.
    """
    if channel.pool is not None:
        return shm.get_into(channel, transfer, deadline)
    if channel.remote is not None:
        return rdma.get_into(channel, transfer, deadline)
    return stream.get_into(channel, transfer, deadline)
