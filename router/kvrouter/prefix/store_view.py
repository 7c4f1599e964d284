"""Where KV stands in the store, as the router asks it: matches, and landings that are awaited.

Nothing here raises for a store that is away or slow: the answer then is "nothing is known", and the
request goes on without reuse.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Protocol

from kvrouter_store.errors import KVStoreError
from kvrouter_store.identity.block import parts_in_common

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvrouter_store.client.results import Match, RegisteredManifest
    from kvrouter_store.identity.block import Manifest

LEARN_DEADLINE_S: Final = 2.0
SHOWN_DIFFERENCES: Final = 4
RELOAD_INTERVAL_S: Final = 0.1
"""Least time between two questions for the store's manifests."""

log = logging.getLogger(__name__)


class LandingOutcome(StrEnum):
    """How the wait for a landing ended."""

    LANDED = "landed"
    TIMEOUT = "timeout"
    STORE_AWAY = "store_away"
    UNKNOWN_MANIFEST = "unknown_manifest"


class HeldLease(Protocol):
    """A lease, as `kvrouter_store.client.asyncio_client.AsyncLease` is one."""

    def release(self) -> None:
        """Give it back without waiting. Idempotent."""


class Waited(Protocol):
    """How a wait at the store ended, as `AsyncLanding` of its client says."""

    @property
    def landed(self) -> bool:
        """Whether all blocks waited for are there."""

    @property
    def blocks(self) -> int:
        """Leading blocks that are there."""

    @property
    def lease(self) -> HeldLease | None:
        """The lease on them, where one was asked for and they landed."""


class StoreOps(Protocol):
    """What the router needs of `kvrouter_store.client.asyncio_client.AsyncStoreClient`."""

    async def manifests(self) -> Sequence[RegisteredManifest]:
        """Every manifest that is registered."""

    async def match(self, manifest: Manifest, hashes: bytes, *, promote: bool = False) -> Match:
        """Leading blocks that are whole; with `promote` they are brought into memory."""

    async def wait(
        self, manifest: Manifest, hashes: bytes, upto: int, deadline_s: float, lease: bool = False
    ) -> Waited:
        """Wait for the first `upto` blocks."""


@dataclass(slots=True)
class LandingResult:
    """The end of a wait. Nobody changes it.

    Attributes:
        outcome: LANDED, or why not.
        blocks: leading blocks that the store holds whole, as far as it told.
        lease: on them, where they landed and one was asked for; its owner must release it.
    """

    outcome: LandingOutcome
    blocks: int = 0
    lease: HeldLease | None = None


class StoreView:
    """The store through the router's eyes. One per router; calls may be made concurrently.

    Args:
        store: a client; this object does not own it.
        clock: seconds, monotonic.

    Attributes:
        counts: of outcomes of waits by name, and `match_failed`; each only grows.
    """

    def __init__(self, store: StoreOps, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._manifests: dict[str, Manifest] = {}
        self._reload_at = float("-inf")
        self._reloading: asyncio.Task[None] | None = None
        self.counts: Counter[str] = Counter()

    async def learn(self, manifest: str) -> None:
        """Fetch a manifest that is not known yet, so that `difference` can speak of it."""
        try:
            async with asyncio.timeout(LEARN_DEADLINE_S):
                await self._find(manifest)
        except (KVStoreError, TimeoutError) as error:
            log.debug("manifest %s: %s", manifest, error)

    def difference(self, one: str, other: str) -> str:
        """What differs between two manifests, in a few words."""
        first, second = self._manifests.get(one), self._manifests.get(other)
        if first is None or second is None:
            return f"manifests {one[:12]} and {other[:12]}"
        parts = parts_in_common(first, second)
        if parts:
            counts = f"{len(first.parts)} and {len(second.parts)}"
            return (
                f'parts: {counts}; with "parts": {parts} in the settings of both they would share'
            )
        return "; ".join(_differences("", first.as_dict(), second.as_dict())[:SHOWN_DIFFERENCES])

    async def match(self, manifest: str, hashes: bytes) -> int:
        """Leading blocks of the chain that are whole in the store; 0 where it does not say.

        It also announces them: what of it lies on the store's disk alone is on its way into memory
        while the request is planned. The client's own deadline bounds it: a store that hangs is
        given up once, and then away.

        Args:
            manifest: hex digest.
            hashes: the chain from its first block on, 32 bytes per block.
        """
        if not hashes:
            return 0
        try:
            found = self._manifests.get(manifest) or await self._find(manifest)
            return (await self._store.match(found, hashes, promote=True)).blocks if found else 0
        except (KVStoreError, TimeoutError):
            self.counts["match_failed"] += 1
            return 0

    async def wait(
        self, manifest: str, hashes: bytes, upto: int, deadline_s: float, *, lease: bool = True
    ) -> LandingResult:
        """Wait until the first `upto` blocks are whole in the store, at most `deadline_s`.

        Cancelling gives the wait up at the store too. A lease in the answer must be released.
        """
        if upto <= 0:
            return self._ended(LandingOutcome.LANDED)
        try:
            found = self._manifests.get(manifest) or await self._find(manifest)
            if found is None:
                return self._ended(LandingOutcome.UNKNOWN_MANIFEST)
            landed = await self._store.wait(found, hashes, upto, deadline_s, lease)
        except (KVStoreError, TimeoutError) as error:
            log.debug("landing: %s", error)
            return self._ended(LandingOutcome.STORE_AWAY)
        outcome = LandingOutcome.LANDED if landed.landed else LandingOutcome.TIMEOUT
        return self._ended(outcome, landed.blocks, landed.lease)

    def _ended(
        self, outcome: LandingOutcome, blocks: int = 0, lease: HeldLease | None = None
    ) -> LandingResult:
        self.counts[outcome] += 1
        return LandingResult(outcome, blocks, lease)

    async def _find(self, manifest: str) -> Manifest | None:
        found = self._manifests.get(manifest)
        if found is None and (self._reloading or self._clock() >= self._reload_at):
            if self._reloading is None:
                self._reloading = asyncio.create_task(self._reload())
                self._reloading.add_done_callback(_look_at)
            await asyncio.shield(self._reloading)
            found = self._manifests.get(manifest)
        return found

    async def _reload(self) -> None:
        try:
            for each in await self._store.manifests():
                self._manifests[each.digest.hex()] = each.manifest
            self._reload_at = self._clock() + RELOAD_INTERVAL_S
        finally:
            self._reloading = None


def _look_at(task: asyncio.Task[None]) -> None:
    """Look at how a task ended: those who awaited it may be gone, and asyncio logs what is left."""
    if not task.cancelled():
        task.exception()


def _differences(path: str, one: object, other: object) -> list[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        keys = sorted({*one, *other})
        parts = [_differences(f"{path}.{k}" if path else k, one.get(k), other.get(k)) for k in keys]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        parts = [_differences(f"{path}[{place}]", a, b) for place, (a, b) in pairs]
    elif isinstance(one, list) and isinstance(other, list):
        parts = [[f"{path}: {len(one)} and {len(other)}"]]
    else:
        parts = [] if one == other else [[f"{path}: {one} and {other}"]]
    return [difference for part in parts for difference in part]
