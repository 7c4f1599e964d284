"""The seam between the client and the ways that bytes travel. Nothing here does I/O."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrouter_store._core import BlockNames, BlockStatus, Segments
from kvrouter_store.connection.channel import Channel, Deadline

__all__ = ["STATUSES", "Read", "Target", "Transport", "Write"]

STATUSES = {int(status): status for status in BlockStatus}


@dataclass(slots=True)
class Target:
    """One part of consecutive blocks `hashes` that follow the block `parent`."""

    manifest_id: int
    part: int
    parent: bytes | None
    hashes: bytes


@dataclass(slots=True)
class Write(Target):
    """What is to be stored there: read from `segments` at `indices`."""

    names: BlockNames
    segments: Segments
    indices: Sequence[int]


@dataclass(slots=True)
class Read:
    """One part of consecutive blocks `hashes`, to be written to `segments` at `indices`."""

    manifest_id: int
    names: BlockNames
    part: int
    hashes: bytes
    segments: Segments
    indices: Sequence[int]
    verify: bool


class Transport(Protocol):
    """Moves bytes over a channel.

    Both calls take the channel for themselves, end by the deadline and leave nothing reserved or
    leased at the server. LinkLost, DeadlineExceeded: the channel is of no more use.
    """

    def put(self, channel: Channel, write: Write, deadline: Deadline) -> list[BlockStatus]:
        """Store the blocks; a status for each (see PutResult). Nothing is visible half-written."""
        ...

    def get_into(self, channel: Channel, read: Read, deadline: Deadline) -> list[BlockStatus]:
        """Read the leading run of blocks that the store has: OK, CORRUPT or MISSING for each.

        The caller's memory of a block that is not OK holds anything.
        """
        ...
