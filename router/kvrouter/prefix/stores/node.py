"""The store's nodes, of which each engine writes to one: usually that of its own host.

There is no consensus and no ring. Names of blocks are the same at all nodes, and each node answers
for what it holds. One that is unreachable or slow raises nothing here: it costs what it holds, and
the request goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from kvrouter.engines.compatibility import digests_differ
from kvrouter.engines.engine import CacheGroup
from kvrouter.prefix.groups import loadable, wait_landed
from kvrouter.prefix.stores.base import LandingOutcome, LandingResult, StoreMatch
from kvrouter_store.errors import KVStoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence

    from kvrouter.engines.engine import Identity
    from kvrouter.engines.families.base import Handoff
    from kvrouter.prefix.groups import Group, Leases
    from kvrouter.prefix.stores.base import Origin, WantedBlocks
    from kvrouter.prefix.stores.node_index import NodeIndex
    from kvrouter_store.client.asyncio_client import AsyncStoreClient
    from kvrouter_store.identity.block import Manifest

LEARN_DEADLINE_S: Final = 2.0
SHOWN_DIFFERENCES: Final = 4
RELOAD_INTERVAL_S: Final = 0.1  # least time between two requests for the store's manifests
MOST_MANIFESTS: Final = 4096
"""Manifests that are remembered; of engines that come back with others for ever, the latest."""

T = TypeVar("T")
MAX_LEFT: Final = 1024  # nodes that left, of which the latest are remembered
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Manifests:
    """What is known of manifests, by hex digest. It holds at every node."""

    known: dict[str, Manifest] = field(default_factory=dict)
    groups: dict[str, tuple[CacheGroup, ...]] = field(default_factory=dict)
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
            landing, leases = await wait_landed(
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
        found = []
        for group in self.manifests.groups_of(manifest):
            known = await self._find(group.manifest)
            if known is None:
                return ()
            found.append((known, group.reach))
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


@dataclass(eq=False)
class NodesView:
    """The view of nodes, by URL. It owns their clients: `start`, then `close`.

    A match asks every node at once. Where an index knows what nodes hold, it names the best of
    them, and only that one is asked: it may have lost blocks meanwhile, it brings those on its disk
    into memory, and it looks into the tiers below.
    """

    open_client: Callable[[str], AsyncStoreClient]  # which is not started yet
    index: NodeIndex | None = None  # None: no node is known to publish what it holds
    counts: Counter[str] = field(default_factory=Counter, init=False)  # also of nodes that left
    _views: dict[str, NodeView] = field(default_factory=dict, init=False)
    manifests: Manifests = field(default_factory=Manifests, init=False)  # at any of them
    _started: bool = field(default=False, init=False)
    _closing: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    _turn: int = field(default=0, init=False)
    _lost: set[str] = field(default_factory=set, init=False)  # URLs, as the log has it
    _several: bool = field(default=False, init=False)  # also when one of them is left
    _left: dict[str, None] = field(default_factory=dict, init=False)  # URLs; engines may name them

    @property
    def clients(self) -> list[AsyncStoreClient]:
        """One of each node."""
        return [view.store for view in self._views.values()]

    @property
    def away(self) -> list[str]:
        """See `StoreView`."""
        return [client.url for client in self.clients if not client.connected]

    @property
    def out_of_reach(self) -> Collection[str]:
        """See `StoreView`."""
        return {*self.away, *self._left} if self._several else ()

    @property
    def nodes(self) -> Collection[str]:
        """See `StoreView`."""
        return self._views if self._several else ()

    def kv_bytes(self, manifest: str | None) -> float:
        """Bytes of the KV of a token, of an engine with this manifest; 0: that is unknown."""
        groups = self.manifests.groups_of(self.manifests.current(manifest or ""))
        known = (self.manifests.known.get(group.manifest) for group in groups)
        return sum(each.block_bytes / each.spec.block_tokens for each in known if each is not None)

    def follow(self, urls: Iterable[str]) -> None:
        """Ask these nodes from now on."""
        before, self._views = self._views, {}
        for url in urls:
            view = before.pop(url, None) or self._opened(url)
            if view is not None:
                self._views[url] = view
        self._several = self._several or len(self._views) > 1
        self._left = {url: None for url in (*self._left, *before) if url not in self._views}
        for url in list(self._left)[:-MAX_LEFT]:
            del self._left[url]
        for gone in before.values():
            log.info("store node %s leaves", gone.store.url)
            self._lost.discard(gone.store.url)
            closing = asyncio.create_task(gone.store.close(), name=f"close {gone.store.url}")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        if self.index is not None:
            self.index.follow(self._views)

    async def start(self, wait_s: float) -> None:
        """Connect in the background; returns when all are connected, or after `wait_s`."""
        self._started = True
        for client in self.clients:
            client.start()
        await asyncio.gather(*(client.wait_connected(wait_s) for client in self.clients))

    async def close(self) -> None:
        """End the connections and what they hold. Idempotent."""
        if self.index is not None:
            self.index.close()
        await asyncio.gather(*(client.close() for client in self.clients), *self._closing)

    async def joins(self, identity: Identity) -> Identity:
        """See `StoreView`. Connectors tell manifests themselves."""
        manifest, groups = identity.manifest, identity.groups
        if manifest is not None:
            await asyncio.gather(*(view.learn(manifest, groups) for view in self._views.values()))
        return identity

    def promised(self, handoff: Handoff, identity: Identity | None) -> tuple[str | None, int]:
        """As its connector says, which may name blocks otherwise than when the engine joined."""
        joined, manifest = identity.manifest if identity else None, handoff.manifest
        if joined and manifest:  # also the same again: it may have been reset before it restarted
            self.manifests.rename(joined, manifest, handoff.groups)
        return manifest, handoff.blocks

    def current(self, manifest: str) -> str:
        """See `StoreView`."""
        return self.manifests.current(manifest)

    async def match(self, manifest: str, hashes: bytes, origin: Origin | None = None) -> StoreMatch:
        """See `StoreView`. Of nodes that hold equally much, another one comes first each time."""
        if len(self._views) == 1 and not self._several:
            (view,) = self._views.values()
            return StoreMatch(await view.match(manifest, hashes))
        urls = list(self._views)
        self._turn = (self._turn + 1) % max(len(urls), 1)
        urls = urls[self._turn :] + urls[: self._turn]
        groups = self.manifests.groups_of(self.manifests.current(manifest))
        known = self.index.match(groups, hashes) if self.index is not None else {}
        held = {u: known[u] for u in urls if u in known and self._views[u].store.connected}
        best = max(held, key=held.__getitem__, default=None)
        asked = [url for url in urls if url == best or url not in held]
        found = await asyncio.gather(*(self._views[u].match(manifest, hashes) for u in asked))
        held.update(zip(asked, found, strict=True))
        return StoreMatch(max(held.values(), default=0), held)

    async def wait(self, wanted: WantedBlocks, deadline_s: float) -> LandingResult:
        """See `StoreView`. Where nobody knows the node, the landing at any of them counts."""
        views, node, held = self._views, wanted.node, wanted.held
        if len(views) == 1 and not self._several:
            (view,) = views.values()
            return await view.wait(wanted, deadline_s, held.blocks)
        if node in self._left:
            self.counts[LandingOutcome.STORE_AWAY] += 1
            return LandingResult(LandingOutcome.STORE_AWAY)
        if node is not None and node in views:
            views = {node: views[node]}
        return await _first_landed(
            {url: view.wait(wanted, deadline_s, held.at(url)) for url, view in views.items()}
        )

    def _opened(self, url: str) -> NodeView | None:
        try:
            client = self.open_client(url)
        except ValueError as error:  # it is plain, and there are files for TLS
            log.warning("store node %s is not used: %s", url, error)
            return None
        log.info("store node %s joins", url)
        client.on_change = partial(self._changed, url)
        if self._started:
            client.start()
        return NodeView(client, manifests=self.manifests, counts=self.counts)

    def _changed(self, url: str, why_away: str) -> None:
        if why_away and url not in self._lost:
            self._lost.add(url)
            log.warning("store node %s is away: %s", url, why_away)
        elif not why_away and url in self._lost:
            self._lost.discard(url)
            log.info("store node %s answers again", url)


async def _first_landed(
    waits: Mapping[str, Coroutine[None, None, LandingResult]],
) -> LandingResult:
    """The first landing, or else the wait that came farthest. Ends the others and their leases."""
    tasks = {asyncio.create_task(wait, name="landing"): node for node, wait in waits.items()}
    best, running = LandingResult(LandingOutcome.STORE_AWAY), set(tasks)
    try:
        while running and best.outcome is not LandingOutcome.LANDED:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            best = max(best, *(replace(t.result(), node=tasks[t]) for t in done), key=_progress)
        return best
    finally:
        for task in tasks:
            task.add_done_callback(partial(_give_back, best))
            task.cancel()


def _give_back(kept: LandingResult, wait: asyncio.Task[LandingResult]) -> None:
    """Release the lease of a wait that has ended, unless it is the one that is kept."""
    if wait.cancelled() or wait.exception() is not None:
        return
    lease = wait.result().lease
    if lease is not None and lease is not kept.lease:
        lease.release()


def _progress(landing: LandingResult) -> tuple[bool, int, bool]:
    outcome = landing.outcome
    return outcome is LandingOutcome.LANDED, landing.blocks, outcome is LandingOutcome.TIMEOUT
