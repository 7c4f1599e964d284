"""What the operations on the store return. Plain values: nothing here holds a connection."""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvrouter_store._core import (
    BlockStatus,
    ManifestInfo,
    ManifestsReply,
    MatchReply,
    StatusesReply,
)
from kvrouter_store.errors import BadDocument
from kvrouter_store.identity.block import Manifest

THERE = (BlockStatus.STORED, BlockStatus.EXISTS, BlockStatus.BUSY)
"""Statuses of a put after which the block is in the store, or soon: BUSY, another stores it now."""


@dataclass(frozen=True, slots=True)
class RegisteredManifest:
    """A manifest as the store lists it. `engines`: the names whose connection lives."""

    manifest_id: int
    digest: bytes
    manifest: Manifest
    engines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SharingRefusal:
    """A living engine that shares nothing, and why."""

    engine: str
    reason: str


class Place(NamedTuple):
    """The first `blocks` blocks are on node `node` in tier `tier` (0 memory, 1 disk, 2 remote)."""

    blocks: int
    node: int
    tier: int


class Match(NamedTuple):
    """The longest leading run of blocks whose full manifest is committed, and where it is."""

    blocks: int
    places: tuple[Place, ...] = ()

    @classmethod
    def of(cls, reply: MatchReply) -> "Match":
        """The match that a reply of the node means."""
        return cls(reply.blocks, tuple(map(Place._make, reply.places)))

    def then(self, after: "Match") -> "Match":
        """Of a chain that goes on, where all of its first blocks match: with the next ones."""
        more = {place[1:]: place.blocks for place in after.places}
        places = (
            place._replace(blocks=place.blocks + more.get(place[1:], 0))
            if place.blocks == self.blocks
            else place
            for place in self.places
        )
        return Match(self.blocks + after.blocks, tuple(places))


class PutResult(NamedTuple):
    """Counts over the blocks of one put, and the status of each in order.

    A status is STORED, EXISTS, BUSY (another client writes it now), NO_SPACE (what could make room
    is leased, the part exceeds the pool, or this client has as much of the pool reserved as it
    may), CORRUPT (the bytes changed on their way) or GONE (the writer took longer than the node's
    --reserve-timeout).
    """

    statuses: tuple[BlockStatus, ...]

    @property
    def stored(self) -> int:
        """Blocks that this put committed."""
        return self.statuses.count(BlockStatus.STORED)

    @property
    def existed(self) -> int:
        """Blocks that were there already (their bytes are kept)."""
        return self.statuses.count(BlockStatus.EXISTS)

    @property
    def refused(self) -> int:
        """Blocks that are not stored after this put, whatever the reason."""
        return len(self.statuses) - self.stored - self.existed


def there(reply: StatusesReply) -> list[bool]:
    """Of each block that was asked about, whether the node has it."""
    return [status == BlockStatus.EXISTS for status in reply.statuses]


def next_page(page: ManifestsReply, after: int) -> int | None:
    """After which id the page that follows begins; None: none does."""
    last = page.manifests[-1].manifest_id if page.manifests else after
    return last if page.more and last > after else None


def understood(infos: Iterable[ManifestInfo]) -> list[RegisteredManifest]:
    """The manifests of a page of MANIFESTS, without documents of another version."""
    found = []
    for info in infos:
        with contextlib.suppress(BadDocument):
            manifest = Manifest.from_doc(info.doc)
            engines = tuple(dict.fromkeys(info.engines))
            found.append(RegisteredManifest(info.manifest_id, info.digest, manifest, engines))
    return found
