"""A connector's link to the store, which lets the engine go on while the store is away.

No operation raises for an absent store: a match is then empty, a put stores nothing, a get misses.
Only the first operation of an outage may wait for its deadline. From then on the engine continues
at once without the store, while the link's own thread looks for the store.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvrouter_store._core import BlockStatus, Segments
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.client.results import PutResult
from kvrouter_store.errors import KVStoreError, StoreClosed, StoreRefused, Unauthorized
from kvrouter_store.identity.block import Manifest
from kvrouter_store.identity.chain import HASH_BYTES

HEARTBEAT_S = 1.0
AWAY_S = 0.1  # between heartbeats to a store that is away; connection.reconnect paces connections

T = TypeVar("T")


@dataclass(eq=False)
class StoreLink:
    """One manifest on one client. Safe in threads. Owns the client and a thread: close() ends both.

    engine: the name under which the store lists this link.
    """

    client: StoreClient
    manifest: Manifest
    log: logging.Logger
    engine: str = ""

    def __post_init__(self) -> None:
        self._registered = False
        self._away = threading.Event()
        self._turn = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-link", daemon=True)

    @property
    def away(self) -> bool:
        """Whether the store is known to be away."""
        return self._away.is_set()

    @property
    def pause_s(self) -> float:
        """Seconds between two heartbeats: a store that is away is asked more often."""
        return AWAY_S if self.away else HEARTBEAT_S

    def start(self) -> None:
        """Register the engine, and keep it registered while it is idle, in the link's thread."""
        self._thread.start()

    def rename(self, manifest: Manifest) -> None:
        """Operate on another manifest from now on. The link's thread registers it."""
        self.manifest, self._registered = manifest, False

    def beat(self) -> bool:
        """Ask the store for a sign of life, registering first if need be; whether it came.

        The client registers the manifest again by itself with each new connection.
        """
        try:
            if not self._registered:
                self.client.register(self.manifest, self.engine)
                self._registered = True
            self.client.stats()
        except KVStoreError as error:
            self._lost(error)
            return False
        if self._away.is_set():
            self._away.clear()
            self.log.warning("the store is back")
        return True

    def match(self, hashes: bytes) -> int:
        """Leading blocks of `hashes` that can be loaded; 0 where the store is away."""
        return self._operate(lambda: self.client.match(self.manifest, hashes).blocks, 0)

    def held(self, hashes: bytes) -> list[bool]:
        """Of each block, in any order, whether it can be loaded; none can where it is away."""
        return self._operate(
            lambda: self.client.held(self.manifest, hashes), [False] * (len(hashes) // HASH_BYTES)
        )

    def put(
        self, part: int, hashes: bytes, span: range, segments: Segments, indices: Sequence[int]
    ) -> PutResult | None:
        """Copy blocks to the store; None where it is away (they are then simply not stored)."""
        return self._operate(
            lambda: self.client.put(self.manifest, part, hashes, span, segments, indices), None
        )

    def get_into(
        self, part: int, hashes: bytes, span: range, segments: Segments, indices: Sequence[int]
    ) -> list[BlockStatus]:
        """Copy blocks from the store into `segments`; all MISSING where it is away."""
        return self._operate(
            lambda: self.client.get_into(self.manifest, part, hashes, span, segments, indices),
            [BlockStatus.MISSING] * len(span),
        )

    def close(self, deadline_s: float = 5.0) -> None:
        """Close the client and end the thread; every later operation finds the store away."""
        self._closed.set()
        self.client.close()
        if self._thread.is_alive():
            self._thread.join(deadline_s)

    def _operate(self, operation: Callable[[], T], without: T) -> T:
        """The operation's result, or `without` where the store is away."""
        if self._away.is_set():
            return without
        try:
            return operation()
        except Unauthorized as error:  # of no use until the store or this client has another token
            self._lost(error)
            return without
        except StoreRefused as error:
            self.log.warning("the store refused: %s", error)
            return without
        except KVStoreError as error:
            self._lost(error)
            return without

    def _lost(self, error: KVStoreError) -> None:
        with self._turn:
            known = self._away.is_set() or isinstance(error, StoreClosed)
            self._away.set()
        if not known:
            self.log.warning("the store is away, going on without it: %s", error)

    def _run(self) -> None:
        while not self._closed.is_set():
            self.beat()
            self._closed.wait(self.pause_s)
