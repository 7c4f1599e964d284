"""What a store node answers to ATTACH: its end of the connection, and where its pool lies."""

from kvstore.rdma.base import Endpoint, Region

__all__ = ["read_card", "write_card"]


def write_card(endpoint: Endpoint, pool: Region) -> bytes:
    """The node's card."""
    return endpoint.to_bytes() + pool.to_bytes()


def read_card(card: bytes) -> tuple[Endpoint, Region]:
    """What `write_card` made. Raises ValueError for anything else."""
    endpoint = Endpoint.from_bytes(card[: Endpoint.SIZE])
    return endpoint, Region.from_bytes(card[Endpoint.SIZE :])
