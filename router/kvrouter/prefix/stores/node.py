"""A store node as the router sees it: matches, landings and manifests.

A store that is unreachable or slow raises nothing here: the request goes on without reuse.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

from kvrouter.engines.compatibility import digests_differ
from kvrouter.engines.engine import CacheGroup
from kvrouter.prefix.groups import landed, loadable
from kvrouter.prefix.stores.base import LandingOutcome, LandingResult
from kvrouter_store.errors import KVStoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvrouter.prefix.groups import Group, Leases
    from kvrouter.prefix.stores.base import WantedBlocks
    from kvrouter_store.client.asyncio_client import AsyncStoreClient
    from kvrouter_store.identity.block import Manifest

LEARN_DEADLINE_S: Final = 2.0
SHOWN_DIFFERENCES: Final = 4
RELOAD_INTERVAL_S: Final = 0.1
"""Least time between two requests for the store's manifests."""
MOST_MANIFESTS: Final = 4096
"""Manifests that are remembered; of engines that come back with others for ever, the latest."""

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Manifests:
    """What is known of manifests, by hex digest. It holds at every node."""

    known: dict[str, Manifest] = field(default_factory=dict)
    groups: dict[str, tuple[CacheGroup, ...]] = field(default_factory=dict)
    resolved: dict[str, Sequence[Group]] = field(default_factory=dict)  # where all are known
    renamed: dict[str, str] = field(default_factory=dict)  # by those of engines when they joined

    def current(self, manifest: str) -> str:
        """The manifest by which an engine that joined with this one names its blocks now."""
        return self.renamed.get(manifest, manifest)

    def groups_of(self, manifest: str) -> tuple[CacheGroup, ...]:
        """What stands for it."""
        return self.groups.get(manifest) or (CacheGroup(manifest),)

    def rename(self, joined: str, manifest: str, groups: tuple[CacheGroup, ...]) -> None:
        """An engine that joined with one manifest names its blocks by another, or by it again."""
        if joined == manifest:
            self.renamed.pop(joined, None)
        elif self.renamed.get(joined) != manifest:
            note(self.renamed, joined, manifest)
            note(self.groups, manifest, groups)

    def difference(self, one: str, other: str) -> str:
        """How two manifests differ, in a few words."""
        first, second = self.known.get(one), self.known.get(other)
        if first is None or second is None:
            return digests_differ(one, other)
        return "; ".join(_differences("", first.as_dict(), second.as_dict())[:SHOWN_DIFFERENCES])


@dataclass(eq=False)
class NodeView:
    """Asks the store by a client that its owner closes. Calls may be concurrent.

    `counts` has the outcomes of waits by name, and `match_failed`. Views may share both.
    """

    store: AsyncStoreClient
    clock: Callable[[], float] = time.monotonic
    manifests: Manifests = field(default_factory=Manifests)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._reload_at = float("-inf")
        self._reloading: asyncio.Task[None] | None = None

    async def learn(self, manifest: str, groups: tuple[CacheGroup, ...] = ()) -> None:
        """Fetch a manifest that is not known yet, for `difference`; note what it stands for."""
        if groups:
            note(self.manifests.groups, manifest, groups)
            self.manifests.resolved.pop(manifest, None)
        try:
            async with asyncio.timeout(LEARN_DEADLINE_S):
                await self._find(manifest)
        except (KVStoreError, TimeoutError) as error:
            log.debug("manifest %s: %s", manifest, error)

    async def match(self, manifest: str, hashes: bytes) -> int:
        """Leading blocks of the chain that an engine can load; 0 if the store does not answer.

        The store brings those that are on its disk alone into memory meanwhile. The client's own
        deadline bounds each question. `manifest` is a hex digest, `hashes` 32 bytes per block.
        """
        if not hashes:
            return 0
        try:
            groups = await self._groups_of(self.manifests.current(manifest))
            return await loadable(self.store, groups, hashes)
        except (KVStoreError, TimeoutError):
            self.counts["match_failed"] += 1
            return 0

    async def wait(self, wanted: WantedBlocks, deadline_s: float, held: int = 0) -> LandingResult:
        """Wait until an engine can load what is wanted, at most `deadline_s`.

        held: how many of them were there already. The last of these stands for all before it,
            whose hashes are not sent again: a block leaves the store only after those that follow.

        Cancellation ends the wait at the store too. A lease in the result must be released.
        """
        upto = wanted.upto
        if upto <= 0:
            return self._ended(LandingOutcome.LANDED)
        span = range(max(0, min(held, upto) - 1), upto)
        try:
            groups = await self._groups_of(wanted.manifest)
            if not groups:
                return self._ended(LandingOutcome.UNKNOWN_MANIFEST)
            landing, leases = await landed(
                self.store, groups, wanted.hashes, span, deadline_s, lease=wanted.lease
            )
        except (KVStoreError, TimeoutError) as error:
            log.debug("landing: %s", error)
            return self._ended(LandingOutcome.STORE_AWAY)
        outcome = LandingOutcome.LANDED if landing.landed else LandingOutcome.TIMEOUT
        return self._ended(outcome, landing.blocks, leases if leases.held else None)

    def _ended(
        self, outcome: LandingOutcome, blocks: int = 0, lease: Leases | None = None
    ) -> LandingResult:
        self.counts[outcome] += 1
        return LandingResult(outcome, blocks, lease)

    async def _groups_of(self, manifest: str) -> Sequence[Group]:
        """What stands for an engine's manifest; none where the store does not know one of them."""
        resolved = self.manifests.resolved.get(manifest)
        if resolved is not None:
            return resolved
        found = []
        for group in self.manifests.groups_of(manifest):
            known = await self._find(group.manifest)
            if known is None:
                return ()
            found.append((known, group.reach))
        note(self.manifests.resolved, manifest, found)
        return found

    async def _find(self, manifest: str) -> Manifest | None:
        """A manifest by its digest; concurrent calls share one request for unknown ones."""
        found = self.manifests.known.get(manifest)
        if found is None and (self._reloading or self.clock() >= self._reload_at):
            if self._reloading is None:
                self._reloading = asyncio.create_task(self._reload())
                self._reloading.add_done_callback(_consume)
            await asyncio.shield(self._reloading)
            found = self.manifests.known.get(manifest)
        return found

    async def _reload(self) -> None:
        try:
            for each in await self.store.manifests():
                note(self.manifests.known, each.digest.hex(), each.manifest)
            self._reload_at = self.clock() + RELOAD_INTERVAL_S
        finally:
            self._reloading = None


def note(told: dict[str, T], manifest: str, value: T) -> None:
    """Remember what was told last of a manifest, and no more than `MOST_MANIFESTS` of them."""
    told.pop(manifest, None)
    told[manifest] = value
    if len(told) > MOST_MANIFESTS:
        del told[next(iter(told))]


def _consume(task: asyncio.Task[None]) -> None:
    """Read the task's exception: all its awaiters may be gone, and asyncio logs unread ones."""
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
