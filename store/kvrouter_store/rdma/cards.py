"""What a store node answers to ATTACH: its end of the connection, and where its pool lies."""

from kvrouter_store.rdma.base import RdmaEndpoint, Region

__all__ = ["read_card", "write_card"]


def write_card(endpoint: RdmaEndpoint, pool: Region) -> bytes:
    """The node's card."""
    return endpoint.to_bytes() + pool.to_bytes()


def read_card(card: bytes) -> tuple[RdmaEndpoint, Region]:
    """What `write_card` made. Raises ValueError for anything else."""
    endpoint = RdmaEndpoint.from_bytes(card[: RdmaEndpoint.SIZE])
    return endpoint, Region.from_bytes(card[RdmaEndpoint.SIZE :])
