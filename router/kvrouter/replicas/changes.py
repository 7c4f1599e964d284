"""What administrators said of engines, agreed upon by all routers of a group.

Of two sayings about one engine the later one counts, by a stamp that is larger than every stamp
that its router knew. So the order in which they are heard makes no difference, and who tells all
that it knows again and again needs nothing that remembers. Synchronous; bounded.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from kvrouter.engines.engine import Role
from kvrouter.options.addresses import bare_address
from kvrouter.replicas.messages import MAX_CHANGES, Change

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvrouter.engines.engine import Engine
    from kvrouter.engines.pool import EnginePool
    from kvrouter.membership.fleet import Fleet
    from kvrouter.replicas.messages import Action

MAX_AHEAD_MS: Final = 3_600_000
"""A stamp so far ahead of this router's clock is not believed: it could never be surpassed."""


class Changes:
    """All changes that this router knows of, by engine.

    Args:
        router: id of this router.
        now_ms: the time of day in milliseconds.
    """

    def __init__(
        self, router: str, now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
    ) -> None:
        self._router = router
        self._now_ms = now_ms
        self._latest: dict[str, Change] = {}
        self._stamp = 0

    def all(self) -> list[Change]:
        """The latest change of each engine."""
        return list(self._latest.values())

    def record(self, address: str, action: Action) -> None:
        """This router was told."""
        self._stamp = max(self._stamp + 1, self._now_ms())
        self._keep(Change(address, action, self._stamp, self._router))

    def merge(self, told: Iterable[Change]) -> list[Change]:
        """Learn what another knows; returns what is new, to be done here too."""
        news = []
        limit = self._now_ms() + MAX_AHEAD_MS
        for change in told:
            known = self._latest.get(bare_address(change.address))
            if change.stamp > limit or (
                known is not None and (known.stamp, known.by) >= (change.stamp, change.by)
            ):
                continue
            self._stamp = max(self._stamp, change.stamp)
            self._keep(change)
            said = (change.address, change.action)
            if known is None or (known.address, known.action) != said:
                news.append(change)
        return news

    def _keep(self, change: Change) -> None:
        self._latest[bare_address(change.address)] = change
        if len(self._latest) > MAX_CHANGES:
            oldest = min(self._latest.values(), key=lambda each: each.stamp)
            del self._latest[bare_address(oldest.address)]


class SharedFleet:
    """The fleet as the admin API changes it: what is said here, the other routers do too.

    Args:
        fleet: of this router.
        pool: its engines.
        changes: takes what is said.
    """

    def __init__(self, fleet: Fleet, pool: EnginePool, changes: Changes) -> None:
        self._fleet = fleet
        self._pool = pool
        self._changes = changes

    def add(self, address: str, role: Role) -> Engine:
        """As `Fleet.add`, everywhere."""
        self._changes.record(address, role.value)
        return self._fleet.add(address, role)

    def remove(self, engine: Engine) -> bool:
        """As `Fleet.remove`, everywhere; tells of this router alone."""
        self._changes.record(engine.address, "drain")
        return self._fleet.remove(engine)

    def cut(self, engine: Engine) -> int:
        """As `Fleet.cut`, everywhere; tells of this router alone."""
        self._changes.record(engine.address, "cut")
        return self._fleet.cut(engine)

    def follow(self, told: Iterable[Change]) -> int:
        """Do what others were told; returns how many changes that were."""
        news = self._changes.merge(told)
        for change in news:
            engine = self._pool.find(change.address)
            if change.action not in ("drain", "cut"):
                self._fleet.add(change.address, Role(change.action))
            elif engine is not None and change.action == "cut":
                self._fleet.cut(engine)
            elif engine is not None and not engine.draining:
                self._fleet.remove(engine)
        return len(news)
