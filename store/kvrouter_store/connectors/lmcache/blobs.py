"""Blobs of several manifests in the store: put, found and leased, got. Imports no LMCache.

Nothing raises for an absent store: nothing is there then.
"""

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import NamedTuple

from kvrouter_store._core import MAX_HASHES, BlockStatus, Segments
from kvrouter_store.client.lease import Lease
from kvrouter_store.client.results import Match
from kvrouter_store.connectors.lmcache.memory import ObjectMemory
from kvrouter_store.connectors.reach import Reach
from kvrouter_store.identity.block import Manifest
from kvrouter_store.identity.chain import HASH_BYTES

PART = 0
IN_MEMORY = 0  # the tier of a Place
NO_NAME = bytes(HASH_BYTES)
MAX_CHUNKS = 1 << 16
Keep = Callable[[Lease, list[int]], None]
"""Takes over a lease, on the blobs at these places."""


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


class ChunkOrder:
    """The predecessors of the chunks that were learnt last, by name. Safe in threads.

    LMCache looks a prompt up chunk by chunk, in order, before it computes and stores what is
    missing. The store then keeps a chunk for as long as it keeps those that follow it: without its
    beginning the rest of a prompt is of no use.
    """

    def __init__(self, most: int = MAX_CHUNKS) -> None:
        self._most = most
        self._before: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def learn(self, names: Sequence[bytes]) -> None:
        """These chunks follow one another."""
        with self._lock:
            for before, name in pairwise(names):
                self._before[name] = before
                self._before.move_to_end(name)
            while len(self._before) > self._most:
                self._before.popitem(last=False)

    def before(self, name: bytes) -> bytes | None:
        """The chunk before this one, where that is known."""
        with self._lock:
            return self._before.get(name)


@dataclass(eq=False)
class Blobs:
    """The blobs that a store has. Safe in threads.

    engine: the name under which the store lists manifests that are put or found.
    order: which blob follows which; `find` adds to it, `put` tells the store.
    """

    reach: Reach
    memory: ObjectMemory
    engine: str
    order: ChunkOrder = field(default_factory=ChunkOrder)
    _introduced: set[bytes] = field(default_factory=set)

    def put(self, blobs: Sequence[Blob]) -> list[BlockStatus]:
        """Store blobs; what the store has is not sent again.

        A status for each, as in `PutResult`; MISSING where the store is away or refused.
        """
        statuses = [BlockStatus.EXISTS] * len(blobs)
        for run in runs_of(blobs):
            self._introduce(run.manifest)
            for missing in run.cut(self._held(run), False):
                for chain in self._chains(missing):
                    for place, status in zip(chain.places, self._put(chain), strict=True):
                        statuses[place] = status
        return statuses

    def find(self, blobs: Sequence[Blob], keep: Keep) -> list[int]:
        """The places of blobs that the store has. `keep` gets leases on those in its memory.

        A blob on the store's disk stays there without a lease.
        """
        found: list[int] = []

        def take(run: Run) -> int:
            blocks = self._lease(run, keep)
            found.extend(run.places[:blocks])
            return blocks

        for run in runs_of(blobs):
            self._introduce(run.manifest)
            self.order.learn([blob.name for blob in run.blobs])
            self._over_gaps(run, take)
        return found

    def get(self, blobs: Sequence[Blob]) -> list[BlockStatus]:
        """Load blobs to their addresses, each checked against its digest: OK, MISSING or CORRUPT.

        The memory of a blob that is not OK holds anything. A corrupt one leaves the store.
        """
        statuses = [BlockStatus.MISSING] * len(blobs)

        def load(run: Run) -> int:
            came = self._get(run)
            for place, status in zip(run.places, came, strict=True):
                statuses[place] = status
            return next((k for k, s in enumerate(came) if s is BlockStatus.MISSING), len(came))

        for run in runs_of(blobs):
            self._over_gaps(run, load)
        return statuses

    def held(self, blobs: Sequence[Blob]) -> list[bool] | None:
        """Whether the store has each; None where it did not answer. No use that delays eviction."""
        found = [False] * len(blobs)
        for run in runs_of(blobs):
            # Where the node's memory is shared, a question that finds all counts as a use of it.
            held = self._asked(run.manifest, NO_NAME + run.names)
            if held is None:
                return None
            for place, here in zip(run.places, held[1:], strict=True):
                found[place] = here
        return found

    def delete(self, blobs: Sequence[Blob]) -> bool:
        """Forget blobs. False where the store is away: it may have them still."""
        return all(self._delete(run) for run in runs_of(blobs))

    def _over_gaps(self, run: Run, act: Callable[[Run], int]) -> None:
        """Act on a run, and again on each run beyond the first blob that was not there.

        act: returns how many leading blobs were there.
        """
        rest = run.part(act(run) + 1)
        if len(rest):
            for further in rest.cut(self._held(rest), True):
                act(further)

    def _introduce(self, manifest: Manifest) -> None:
        """Have the store list it, once; the client does so again with each connection."""
        if manifest.digest in self._introduced:
            return
        register = self.reach.client.register
        if self.reach.operate(lambda: register(manifest, self.engine), None) is not None:
            self._introduced.add(manifest.digest)

    def _held(self, run: Run) -> list[bool]:
        return self._asked(run.manifest, run.names) or [False] * len(run)

    def _asked(self, manifest: Manifest, names: bytes) -> list[bool] | None:
        return self.reach.operate(lambda: self.reach.client.held(manifest, names), None)

    def _delete(self, run: Run) -> bool:
        client = self.reach.client
        deleted = self.reach.operate(lambda: client.delete(run.manifest, run.names), None)
        return deleted is not None

    def _chains(self, run: Run) -> Iterator[Run]:
        """The run, cut where a blob does not follow the one before it."""
        starts = [
            k
            for k, blob in enumerate(run.blobs)
            if not k or self.order.before(blob.name) != run.blobs[k - 1].name
        ]
        for first, stop in zip(starts, [*starts[1:], len(run)], strict=True):
            yield run.part(first, stop)

    def _put(self, run: Run) -> list[BlockStatus]:
        parent = self.order.before(run.blobs[0].name) or b""
        first = len(parent) // HASH_BYTES
        span = range(first, first + len(run))
        segments, indices = self._place(run)
        chain, client = parent + run.names, self.reach.client
        put = self.reach.operate(
            lambda: client.put(run.manifest, PART, chain, span, segments, indices), None
        )
        return list(put.statuses) if put else [BlockStatus.MISSING] * len(run)

    def _lease(self, run: Run, keep: Keep) -> int:
        """How many leading blobs are there. A lease is taken on those in memory.

        Not on all: a lease would bring the others from the disk, which LMCache may never ask for.
        """
        client, names = self.reach.client, run.names
        match = self.reach.operate(lambda: client.match(run.manifest, names), Match(0))
        here = next((place.blocks for place in match.places if place.tier == IN_MEMORY), 0)
        if not here:
            return match.blocks
        leading = names[: here * HASH_BYTES]
        lease = self.reach.operate(lambda: client.acquire(run.manifest, leading), None)
        if lease is None:
            return match.blocks
        if lease.blocks:
            keep(lease, run.places[: lease.blocks])
        return match.blocks if lease.blocks == here else lease.blocks

    def _get(self, run: Run) -> list[BlockStatus]:
        segments, indices = self._place(run)
        client, span = self.reach.client, range(len(run))
        return self.reach.operate(
            lambda: client.get_into(run.manifest, PART, run.names, span, segments, indices),
            [BlockStatus.MISSING] * len(run),
        )

    def _place(self, run: Run) -> tuple[Segments, list[int]]:
        return self.memory.place([blob.address for blob in run.blobs], run.manifest.block_bytes)


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
