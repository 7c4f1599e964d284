"""Stores of other projects, which hold no lease and say nothing by themselves: the router polls.

The router asks whether KV exists. It never reads any.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Final, Protocol

from kvrouter.engines.compatibility import digests_differ
from kvrouter.prefix.groups import Leases
from kvrouter.prefix.stores.base import NOTHING_HELD, LandingOutcome, LandingResult, StoreMatch
from kvrouter_store.errors import KVStoreError, StoreRefused
from kvrouter_store.identity.chain import HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from kvrouter.engines.engine import CacheGroup, Identity
    from kvrouter.engines.families.base import Handoff
    from kvrouter.prefix.stores.base import Origin
    from kvrouter.prefix.stores.http_peer import HttpPeer

MATCH_S: Final = 2.0
"""For all questions of one match: more than for one, which shows that a store hangs."""
FIRST_PAUSE_S: Final = 0.005
LONGEST_PAUSE_S: Final = 0.2
POLLS_PER_S: Final = 200
"""Of all landings together; matches are not counted."""

log = logging.getLogger(__name__)


class Catalogue(Protocol):
    """What one kind of store holds, by its own names."""

    @property
    def keeps_engines(self) -> bool:
        """Whether engines need what is asked here, to store and to load."""

    def adopt(self, identity: Identity) -> Identity:
        """See `StoreView.adopt`."""

    def possible(self, manifest: str, upto: int, origin: Origin | None) -> int | None:
        """How many of `upto` blocks can be there at all; None: they have no names here."""

    async def held(
        self, manifest: str, hashes: bytes, held: int, upto: int, origin: Origin | None
    ) -> int:
        """How many of the first `upto` blocks are there, of which `held` are known to be.

        Raises KVStoreError.
        """


@dataclass(eq=False)
class PollingView:
    """Matches by one look, and awaits landings by looking again, with growing pauses."""

    nodes: ClassVar[tuple[str, ...]] = ()

    peer: HttpPeer  # answers the catalogue; started and closed here
    catalogue: Catalogue
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    counts: Counter[str] = field(default_factory=Counter, init=False)
    _next_s: float = field(default=float("-inf"), init=False)  # when the next poll may go
    _refusal: str = field(default="", init=False)  # the last one, which was logged

    @property
    def clients(self) -> list[HttpPeer]:
        """See `StoreView`."""
        return [self.peer]

    async def start(self, wait_s: float) -> None:
        """See `StoreView`."""
        self.peer.start()
        await self.peer.wait_connected(wait_s)

    async def close(self) -> None:
        """See `StoreView`."""
        await self.peer.close()

    def follow(self, urls: Collection[str]) -> bool:
        """It has no nodes."""
        return False

    def adopt(self, identity: Identity) -> Identity:
        """As the catalogue does, where the engine speaks to a store at all."""
        able = identity.family == "store" and identity.block_tokens
        return self.catalogue.adopt(identity) if able else identity

    def promised(self, handoff: Handoff, identity: Identity | None) -> tuple[str | None, int]:
        """All blocks that another engine can load: it always computes the last token."""
        if identity is None or not identity.block_tokens:
            return None, 0
        return identity.manifest, max(0, (handoff.prompt_tokens or 0) - 1) // identity.block_tokens

    async def learn(self, manifest: str, groups: tuple[CacheGroup, ...] = ()) -> None:
        """Nothing is known of manifests but their names."""

    def rename(self, joined: str, manifest: str, groups: tuple[CacheGroup, ...]) -> None:
        """Engines do not rename their blocks here."""

    def difference(self, one: str, other: str) -> str:
        """Their names."""
        return digests_differ(one, other)

    async def match(self, manifest: str, hashes: bytes, origin: Origin | None = None) -> StoreMatch:
        """Leading blocks that are there; 0 if the store does not answer."""
        upto = self.catalogue.possible(manifest, len(hashes) // HASH_BYTES, origin)
        if not upto:
            return NOTHING_HELD
        try:
            async with asyncio.timeout(MATCH_S):
                return StoreMatch(await self.catalogue.held(manifest, hashes, 0, upto, origin))
        except (KVStoreError, TimeoutError) as error:
            self._failed(error)
            self.counts["match_failed"] += 1
            return NOTHING_HELD

    async def wait(
        self,
        manifest: str,
        hashes: bytes,
        upto: int,
        deadline_s: float,
        *,
        held: StoreMatch = NOTHING_HELD,
        node: str | None = None,
        lease: bool = True,
        origin: Origin | None = None,
    ) -> LandingResult:
        """Poll until the first `upto` blocks are there. A lease of the result is empty.

        Where the store cannot say, and engines do without its answer, that of the prefill leg
        counts. What a store never holds, as less than a chunk, is not awaited.
        """
        blocks, until_s, pause_s = min(held.blocks, upto), self.clock() + deadline_s, 0.0
        possible = self.catalogue.possible(manifest, upto, origin)
        if possible is None:
            return self._ended(LandingOutcome.UNKNOWN_MANIFEST, upto, lease=False)
        try:
            while blocks < possible:
                if not await self._turn(pause_s, until_s):
                    return self._ended(LandingOutcome.TIMEOUT, blocks, lease=False)
                async with asyncio.timeout(max(0.0, until_s - self.clock()) + FIRST_PAUSE_S):
                    blocks = await self.catalogue.held(manifest, hashes, blocks, possible, origin)
                pause_s = min(max(2 * pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
        except TimeoutError:
            return self._ended(LandingOutcome.TIMEOUT, blocks, lease=False)
        except KVStoreError as error:
            self._failed(error)
            blocks = blocks if self.catalogue.keeps_engines else upto
            return self._ended(LandingOutcome.STORE_AWAY, blocks, lease=False)
        return self._ended(LandingOutcome.LANDED, upto, lease=lease)

    async def _turn(self, pause_s: float, until_s: float) -> bool:
        """Wait for the next poll, a pause and its turn among all; False: it is after `until_s`."""
        now_s = self.clock()
        if now_s >= until_s and pause_s:
            return False
        turn_s = self._next_s = max(self._next_s + 1 / POLLS_PER_S, now_s)
        await self.sleep(max(0.0, min(max(now_s + pause_s, turn_s), until_s) - now_s))
        return turn_s <= until_s

    def _ended(self, outcome: LandingOutcome, blocks: int, *, lease: bool) -> LandingResult:
        self.counts[outcome] += 1
        return LandingResult(outcome, blocks, Leases() if lease else None)

    def _failed(self, error: Exception) -> None:
        """Log a refusal once: every question will get it, until a setting is changed."""
        told, refused = str(error), isinstance(error, StoreRefused)
        log.log(logging.WARNING if refused and told != self._refusal else logging.DEBUG, told)
        self._refusal = told if refused else self._refusal
