"""A byte stream (Unix socket or TCP): payloads go straight from and into the caller's memory."""

from kvrouter_store._core import BlockStatus
from kvrouter_store.client.transports.base import Transfer
from kvrouter_store.connection.channel import Channel
from kvrouter_store.connection.deadline import Deadline
from kvrouter_store.errors import StoreRefused


def put(channel: Channel, transfer: Transfer, deadline: Deadline) -> list[BlockStatus]:
    """Send the blocks, with their digests unless the node has them off."""
    try:
        return channel.exchange(
            channel.link.put,
            transfer.manifest_id,
            transfer.part,
            transfer.parent,
            transfer.hashes,
            transfer.segments,
            transfer.indices,
            deadline.at,
        )
    except StoreRefused:
        channel.close()  # the node reads nothing after a PUT that it refused
        raise


def get_into(channel: Channel, transfer: Transfer, deadline: Deadline) -> list[BlockStatus]:
    """Ask for the leading run and receive it in place, checking digests on the way."""
    return channel.exchange(
        channel.link.get,
        transfer.manifest_id,
        transfer.part,
        transfer.hashes,
        transfer.segments,
        transfer.indices,
        transfer.verify,
        deadline.at,
    )
