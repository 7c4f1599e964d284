"""Blobs of a task in the order in which the store is asked for them. Moves no bytes."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from kvrouter_store._core import MAX_HASHES
from kvrouter_store.identity.block import Manifest


class Blob(NamedTuple):
    """A blob by its name under its manifest, and where its bytes are or shall be in memory."""

    manifest: Manifest
    name: bytes
    address: int = 0


@dataclass(frozen=True)
class Run:
    """Blobs of one manifest, in order, with their places in a task."""

    manifest: Manifest
    places: list[int]
    blobs: list[Blob]

    def __len__(self) -> int:
        return len(self.blobs)

    @property
    def names(self) -> bytes:
        """The names of the blobs, 32 bytes each."""
        return b"".join(blob.name for blob in self.blobs)

    def part(self, first: int, stop: int | None = None) -> "Run":
        """The blobs from `first` up to `stop`."""
        return Run(self.manifest, self.places[first:stop], self.blobs[first:stop])

    def cut(self, marks: Sequence[object], wanted: object) -> Iterator["Run"]:
        """The longest runs of neighbours with the wanted mark; one mark for each blob."""
        for mark, members in groupby(range(len(self)), marks.__getitem__):
            if mark == wanted:
                indices = list(members)
                yield self.part(indices[0], indices[-1] + 1)


def runs_of(blobs: Sequence[Blob]) -> list[Run]:
    """The blobs by manifest, in their order, at most as many as one request may name."""
    by_manifest: defaultdict[bytes, list[int]] = defaultdict(list)
    for place, blob in enumerate(blobs):
        by_manifest[blob.manifest.digest].append(place)
    pieces = (
        places[at : at + MAX_HASHES]
        for places in by_manifest.values()
        for at in range(0, len(places), MAX_HASHES)
    )
    return [
        Run(blobs[places[0]].manifest, places, [blobs[place] for place in places])
        for places in pieces
    ]
