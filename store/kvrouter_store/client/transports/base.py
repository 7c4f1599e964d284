"""What the client hands to a transport. Nothing here does I/O."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvrouter_store._core import BlockNames, BlockStatus, Segments

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
