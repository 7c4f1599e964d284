"""Stores of other projects, which hold no lease and say nothing by themselves: the router polls.

The router asks whether KV exists. It never reads any.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Final, Protocol

from kvrouter.prefix.groups import Leases
from kvrouter.prefix.stores.base import NOTHING_HELD, LandingOutcome, LandingResult, StoreMatch
from kvrouter_store.errors import KVStoreError, StoreUnavailable
from kvrouter_store.identity.chain import HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvrouter.engines.engine import Identity
    from kvrouter.engines.families.base import Handoff
    from kvrouter.prefix.stores.base import Origin
    from kvrouter.prefix.stores.http_peer import HttpPeer

MATCH_S: Final = 2.0
"""For all questions of one match: more than for one, which shows that a store hangs."""
FIRST_PAUSE_S: Final = 0.005
LONGEST_PAUSE_S: Final = 0.2
POLLS_PER_S: Final = 200
"""Of all landings that are awaited, after their first: pauses grow beyond the longest for that."""


class Catalogue(Protocol):
    """How one kind of store is asked for blocks, by its own names."""

    health_path: ClassVar[str]  # a page that answers 200 with JSON while the store is well
    keeps_engines: ClassVar[bool]  # whether engines need what is asked here, to store and to load
    server: ClassVar[str]  # what the URL must name, for people
    forms: ClassVar[str]  # of the options, for people

    def named(self, identity: Identity) -> Identity:
        """The identity with the store's own name for it as manifest."""

    def possible(self, upto: int, origin: Origin | None) -> int:
        """How many of `upto` blocks can be there at all."""

    async def held(
        self, peer: HttpPeer, manifest: str, hashes: bytes, span: range, origin: Origin | None
    ) -> int:
        """How many leading blocks are there, of which those before `span` are known to be.

        Raises KVStoreError.
        """


@dataclass(eq=False)
class PollingView:
    """Matches by one look, and awaits landings by looking again, with growing pauses."""

    nodes: ClassVar[tuple[str, ...]] = ()
    out_of_reach: ClassVar[tuple[str, ...]] = ()

    peer: HttpPeer  # answers the catalogue; started and closed here
    catalogue: Catalogue
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    counts: Counter[str] = field(default_factory=Counter, init=False)
    _waiting: int = field(default=0, init=False)

    @property
    def clients(self) -> list[HttpPeer]:
        """See `StoreView`."""
        return [self.peer]

    @property
    def away(self) -> list[str]:
        """See `StoreView`."""
        return [] if self.peer.connected else [self.peer.url]

    async def start(self, wait_s: float) -> None:
        """See `StoreView`."""
        await self.peer.start(wait_s)

    async def close(self) -> None:
        """See `StoreView`."""
        await self.peer.close()

    async def joins(self, identity: Identity) -> Identity:
        """See `StoreView`. What cannot be asked for gets no name."""
        able = identity.family == "store" and identity.block_tokens
        return self.catalogue.named(identity) if able else identity

    def promised(self, handoff: Handoff, identity: Identity | None) -> tuple[str | None, int]:
        """All blocks that another engine can load: it always computes the last token."""
        if identity is None or not identity.block_tokens:
            return None, 0
        return identity.manifest, max(0, (handoff.prompt_tokens or 0) - 1) // identity.block_tokens

    def current(self, manifest: str) -> str:
        """See `StoreView`: no engine renames its blocks here."""
        return manifest

    async def match(self, manifest: str, hashes: bytes, origin: Origin | None = None) -> StoreMatch:
        """Leading blocks that are there; 0 if the store does not answer."""
        span = range(self.catalogue.possible(len(hashes) // HASH_BYTES, origin))
        try:
            async with asyncio.timeout(MATCH_S):
                blocks = await self.catalogue.held(self.peer, manifest, hashes, span, origin)
        except (KVStoreError, TimeoutError):
            self.counts["match_failed"] += 1
            return NOTHING_HELD
        return StoreMatch(blocks)

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

        What the store never holds, as less than a chunk, is not awaited. Where it does not answer,
        and engines do without that, the answer of the prefill leg counts. Where they need it, and
        it answers too late, it may be well again before the deadline.
        """
        blocks, until_s, pause_s = min(held.blocks, upto), self.clock() + deadline_s, 0.0
        possible = self.catalogue.possible(upto, origin)
        self._waiting += 1
        try:
            async with asyncio.timeout(deadline_s + FIRST_PAUSE_S):  # the last answer may be late
                while blocks < possible:
                    if pause_s and self.clock() >= until_s:
                        return self._ended(LandingOutcome.TIMEOUT, blocks)
                    await self.sleep(min(pause_s, max(0.0, until_s - self.clock())))
                    blocks = await self._look(manifest, hashes, range(blocks, possible), origin)
                    pause_s = min(max(2 * pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
                    pause_s = max(pause_s, self._waiting / POLLS_PER_S)
        except TimeoutError:
            return self._ended(LandingOutcome.TIMEOUT, blocks)
        except KVStoreError:
            blocks = blocks if self.catalogue.keeps_engines else upto
            return self._ended(LandingOutcome.STORE_AWAY, blocks)
        finally:
            self._waiting -= 1
        return self._ended(LandingOutcome.LANDED, upto)

    async def _look(self, manifest: str, hashes: bytes, span: range, origin: Origin | None) -> int:
        """How many blocks are there now; as many as before where the answer came too late."""
        try:
            return await self.catalogue.held(self.peer, manifest, hashes, span, origin)
        except StoreUnavailable:
            if not (self.peer.slow and self.catalogue.keeps_engines):
                raise
            return span.start

    def _ended(self, outcome: LandingOutcome, blocks: int) -> LandingResult:
        self.counts[outcome] += 1
        lease = Leases() if outcome is LandingOutcome.LANDED else None
        return LandingResult(outcome, blocks, lease)
