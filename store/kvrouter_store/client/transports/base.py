"""The seam between the client and the transports. Nothing here does I/O."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrouter_store._core import BlockNames, BlockStatus, Segments
from kvrouter_store.connection.channel import Channel
from kvrouter_store.connection.deadline import Deadline

STATUSES = {int(status): status for status in BlockStatus}


@dataclass(slots=True)
class Target:
    """One part of consecutive blocks `hashes` that follow the block `parent`."""

    manifest_id: int
    part: int
    parent: bytes | None
    hashes: bytes


@dataclass(slots=True)
class Transfer(Target):
    """These blocks, to be put from `segments` at `indices` or got into them.

    `verify`: whether a get checks digests.
    """

    names: BlockNames
    segments: Segments
    indices: Sequence[int]
    verify: bool


class Transport(Protocol):
    """Moves bytes over a channel.

    Both calls take the channel for themselves, end by the deadline and leave nothing reserved or
    leased at the node. LinkLost, DeadlineExceeded: the channel is of no more use.
    """

    def put(self, channel: Channel, transfer: Transfer, deadline: Deadline) -> list[BlockStatus]:
        """Store the blocks; a status for each (see PutResult). Nothing is visible half-written."""
        ...

    def get_into(
        self, channel: Channel, transfer: Transfer, deadline: Deadline
    ) -> list[BlockStatus]:
        """Read the leading run of blocks that the store has: OK, CORRUPT or MISSING for each.

        The caller's memory of a block that is not OK holds anything.
        """
        ...
