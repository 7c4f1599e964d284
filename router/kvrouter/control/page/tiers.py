"""Polls the store's nodes for the state of their tiers, in the background."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING, Final

from kvrouter.control.page.model import StoreCard, TierCard
from kvrouter_store.errors import KVStoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from kvrouter.prefix.stores.base import StoreClient

POLL_S: Final = 2.0


class StoreWatches:
    """Keeps the last answers of all nodes, whose clients are not closed here."""

    def __init__(self, clients: Callable[[], Iterable[StoreClient]]) -> None:
        self._clients = clients
        self._watches: dict[StoreClient, StoreWatch] = {}

    async def keep_polling(self) -> None:
        """Poll every `POLL_S` seconds, until cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(POLL_S)

    async def poll(self) -> None:
        """Poll each once."""
        await asyncio.gather(*(watch.poll() for watch in self._current()))

    def cards(self) -> list[StoreCard]:
        """The last answer of each node there is now."""
        return [watch.card() for watch in self._current()]

    def _current(self) -> list[StoreWatch]:
        before = self._watches
        self._watches = {c: before.get(c) or StoreWatch(c) for c in self._clients()}
        return list(self._watches.values())


class StoreWatch:
    """Keeps the last answer of one node."""

    def __init__(self, client: StoreClient, clock: Callable[[], float] = monotonic) -> None:
        self._client = client
        self._clock = clock
        self._stats: Mapping[str, int] = {}
        self._answered_s: float | None = None
        self._problem: str | None = None

    async def poll(self) -> None:
        """Poll once. Does not raise if the store is away or slow."""
        try:
            stats = await self._client.stats()
        except (KVStoreError, TimeoutError) as error:
            self._problem = str(error)
            return
        self._problem, self._stats, self._answered_s = None, stats, self._clock()

    def card(self) -> StoreCard:
        """Its last answer."""
        return StoreCard(
            url=self._client.url,
            connected=self._client.connected,
            age_s=None if self._answered_s is None else round(self._clock() - self._answered_s, 3),
            problem=self._problem,
            tiers=self._tiers(),
            leases=self._stats.get("leases", 0),
            connections=_series(self._stats, "connections."),
        )

    def _tiers(self) -> list[TierCard]:
        stats, tiers = self._stats, []
        if stats:
            used = stats.get("used_bytes", 0) + stats.get("lent_bytes", 0)
            note = "the node drains: it is about to stop" if stats.get("draining") else None
            size, blocks = stats.get("pool_bytes", 0), stats.get("blocks", 0)
            tiers.append(TierCard("memory", size, used, blocks, note))
        if stats.get("disk_bytes"):
            reasons = [name for name, on in _series(stats, "disk_bypassed.").items() if on]
            note = f"not used for now: {', '.join(reasons)}" if reasons else None
            used, blocks = stats.get("disk_used_bytes", 0), stats.get("disk_blocks", 0)
            tiers.append(TierCard("disk", stats["disk_bytes"], used, blocks, note))
        if below := _series(stats, "tier_up."):
            away = [name for name, up in below.items() if not up]
            note = f"away: {', '.join(away)}" if away else None
            tiers.append(TierCard("remote", 0, 0, 0, note))
        return tiers


def _series(stats: Mapping[str, int], prefix: str) -> dict[str, int]:
    return {name[len(prefix) :]: v for name, v in stats.items() if name.startswith(prefix)}
