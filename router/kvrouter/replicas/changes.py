"""Engines that operators added or removed, agreed upon by all routers of a group.

Of two changes of one engine the one with the larger stamp wins, and a router stamps a change higher
than every stamp that it knows. So the order in which changes arrive makes no difference, and a
router can repeat all of them at any time. Synchronous; bounded.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvrouter.engines.engine import Engine, Role
from kvrouter.membership.fleet import FleetFull
from kvrouter.options.addresses import bare_address
from kvrouter.replicas.messages import MAX_CHANGES, Action, Change

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvrouter.engines.pool import EnginePool
    from kvrouter.membership.fleet import Fleet

CHANGES_PER_TURN: Final = 4
MAX_AHEAD_MS: Final = 3_600_000
"""A stamp further ahead of this router's clock is ignored: no change could win against it."""


@dataclass(eq=False)
class Changes:
    """The latest change of each engine, recorded by `router` at `now_ms` (Unix time)."""

    router: str
    now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000

    def __post_init__(self) -> None:
        self._latest: dict[str, Change] = {}
        self._stamp = 0

    def all(self) -> list[Change]:
        """The latest change of each engine."""
        return list(self._latest.values())

    def record(self, address: str, action: Action) -> None:
        """Record a change that an operator made on this router."""
        self._stamp = max(self._stamp + 1, self.now_ms())
        self._keep(Change(address, action, self._stamp, self.router))

    def merge(self, changes: Iterable[Change]) -> list[Change]:
        """Take over changes of another router; returns those that this router must carry out."""
        news = []
        limit = self.now_ms() + MAX_AHEAD_MS
        for change in changes:
            known = self._latest.get(bare_address(change.address))
            if change.stamp > limit or (
                known is not None and (known.stamp, known.by) >= (change.stamp, change.by)
            ):
                continue
            self._stamp = max(self._stamp, change.stamp)
            self._keep(change)
            wanted = (change.address, change.action)
            if known is None or (known.address, known.action) != wanted:
                news.append(change)
        return news

    def _keep(self, change: Change) -> None:
        address = bare_address(change.address)
        self._latest.pop(address, None)
        self._latest[address] = change
        if len(self._latest) > MAX_CHANGES:
            del self._latest[next(iter(self._latest))]  # the one that was taken first


class SharedFleet:
    """The fleet as the admin API changes it: the other routers make each change too.

    Theirs are carried out a few at a time: another router may send many at once.
    """

    def __init__(self, fleet: Fleet, pool: EnginePool, changes: Changes) -> None:
        self._fleet = fleet
        self._pool = pool
        self._changes = changes
        self._waiting: deque[Change] = deque(maxlen=MAX_CHANGES)

    def add(self, address: str, role: Role) -> Engine:
        """As `Fleet.add`, on all routers."""
        engine = self._fleet.add(address, role)
        self._changes.record(address, role.value)  # type: ignore[arg-type]  # no store node
        return engine

    def remove(self, engine: Engine) -> bool:
        """As `Fleet.remove`, on all routers; the result is about this router alone."""
        self._changes.record(engine.address, "drain")
        return self._fleet.remove(engine)

    def cut(self, engine: Engine) -> int:
        """As `Fleet.cut`, on all routers; the result is about this router alone."""
        self._changes.record(engine.address, "cut")
        return self._fleet.cut(engine)

    def follow(self, changes: Iterable[Change]) -> int:
        """Begin to carry out changes of other routers; returns how many were new."""
        news = self._changes.merge(changes)
        self._waiting.extend(news)
        self.carry_out()
        return len(news)

    def carry_out(self) -> None:
        """Carry out some of the changes that wait; to be called many times a second."""
        for _ in range(min(len(self._waiting), CHANGES_PER_TURN)):
            self._carry_out(self._waiting.popleft())

    def _carry_out(self, change: Change) -> None:
        engine = self._pool.find(change.address)
        if change.action not in ("drain", "cut"):
            with suppress(FleetFull):
                self._fleet.add(change.address, Role(change.action))
        elif engine is not None and change.action == "cut":
            self._fleet.cut(engine)
        elif engine is not None and not engine.draining:
            self._fleet.remove(engine)
