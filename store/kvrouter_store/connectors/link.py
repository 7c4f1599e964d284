"""A connector's link to the store: one manifest, for an engine that goes on without the store.

No operation raises for an absent store: a match is then empty, a put stores nothing, a get misses.
"""

import logging
from collections.abc import Sequence

from kvrouter_store._core import BlockStatus, Segments
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.client.lease import Lease, Reservation
from kvrouter_store.client.results import PutResult
from kvrouter_store.connectors.reach import Reach
from kvrouter_store.identity.block import Manifest
from kvrouter_store.identity.chain import HASH_BYTES


class StoreLink(Reach):
    """One manifest on one client. Safe in threads. Owns the client and a thread: close() ends both.

    engine: the name under which the store lists this link. It is registered, and kept registered
    while the engine is idle, in the link's thread.
    """

    def __init__(
        self, client: StoreClient, manifest: Manifest, log: logging.Logger, engine: str = ""
    ) -> None:
        super().__init__(client, log, self._register)
        self.manifest = manifest
        self.engine = engine
        self._registered = False

    def rename(self, manifest: Manifest) -> None:
        """Operate on another manifest from now on. The link's thread registers it."""
        self.client.forget(self.manifest)
        self.manifest, self._registered = manifest, False

    def match(self, hashes: bytes) -> int:
        """Leading blocks of `hashes` that can be loaded; 0 where the store is away."""
        return self.operate(lambda: self.client.match(self.manifest, hashes).blocks, 0)

    def held(self, hashes: bytes) -> list[bool]:
        """Of each block, in any order, whether it can be loaded; none can where it is away."""
        return self.operate(
            lambda: self.client.held(self.manifest, hashes), [False] * (len(hashes) // HASH_BYTES)
        )

    def acquire(self, hashes: bytes, part: int) -> Lease | None:
        """A lease on the leading blocks that can be loaded; None where the store is away."""
        return self.operate(lambda: self.client.acquire(self.manifest, hashes, part), None)

    def put(
        self, part: int, hashes: bytes, span: range, segments: Segments, indices: Sequence[int]
    ) -> PutResult | None:
        """Copy blocks to the store; None where it is away (they are then simply not stored)."""
        return self.operate(
            lambda: self.client.put(self.manifest, part, hashes, span, segments, indices), None
        )

    def reserve(self, part: int, hashes: bytes, span: range) -> Reservation | None:
        """Slots of one part of these blocks, where the node's memory is mapped; None: none."""
        return self.operate(lambda: self.client.reserve(self.manifest, part, hashes, span), None)

    def get_into(
        self, part: int, hashes: bytes, span: range, segments: Segments, indices: Sequence[int]
    ) -> list[BlockStatus]:
        """Copy blocks from the store into `segments`; all MISSING where it is away."""
        return self.operate(
            lambda: self.client.get_into(self.manifest, part, hashes, span, segments, indices),
            [BlockStatus.MISSING] * len(span),
        )

    def _register(self) -> None:
        """The client registers the manifest again by itself with each new connection."""
        if not self._registered:
            self.client.register(self.manifest, self.engine)
            self._registered = True
