"""Combines what all sources name: an engine or store node stays while any of them names it.

A synchronous state machine. It passes only differences to the fleet: an engine that was added or
removed by hand stays so until a source changes what it names.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from kvrouter.engines.engine import Role
from kvrouter.membership.discovery.base import both_roles, too_many

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvrouter.membership.discovery.base import Members
    from kvrouter.membership.fleet import Fleet

MAX_NODES: Final = 256
"""Nodes of the store, of all sources together: each request may ask all of them."""

log = logging.getLogger(__name__)


class SourceStatus:
    """The reports of one source: its `Listener`."""

    def __init__(self, name: str, changed: Callable[[Iterable[str]], None]) -> None:
        self.name = name
        self.members: Members = {}  # what it named last
        self.problem: str | None = None  # why its last reading failed
        self.reported = asyncio.Event()
        self._changed = changed

    @property
    def up(self) -> bool:
        """Whether its last reading succeeded."""
        return self.reported.is_set() and self.problem is None

    def named(self, members: Members, *, restore: bool = False) -> None:
        """See `Listener`."""
        if problem := too_many(members):
            self.failed(problem)
            return
        if members != self.members or not self.up:
            log.info("discovery %s names %d members", self.name, len(members))
        self.problem = None
        self.reported.set()
        if restore or members != self.members:
            self.members = dict(members)
            self._changed(members if restore else ())

    def failed(self, problem: str) -> None:
        """See `Listener`."""
        if problem != self.problem:
            log.warning(
                "discovery %s cannot be read, its %d members stay: %s",
                self.name,
                len(self.members),
                problem,
            )
        self.problem = problem
        self.reported.set()


class MergedSources:
    """What sources name: engines go to `fleet`, all URLs of store nodes to `follow_nodes`.

    `statuses` are in the order of the sources.
    """

    def __init__(self, fleet: Fleet, follow_nodes: Callable[[list[str]], None]) -> None:
        self._fleet = fleet
        self._follow_nodes = follow_nodes
        self.statuses: list[SourceStatus] = []
        self._members: dict[str, Role] = {}  # engines
        self._nodes: list[str] = []

    def add(self, name: str) -> SourceStatus:
        """The listener for one more source."""
        status = SourceStatus(name, self._update)
        self.statuses.append(status)
        return status

    def _update(self, restored: Iterable[str]) -> None:
        named = both_roles(each for status in self.statuses for each in status.members.items())
        nodes = [address for address, role in named.items() if role is Role.STORE]
        used = nodes[:MAX_NODES]
        if used != self._nodes:
            if len(nodes) > MAX_NODES:
                log.warning("of %d store nodes the first %d are used", len(nodes), MAX_NODES)
            self._nodes = used
            self._follow_nodes(used)
        before = self._members
        after: dict[str, Role] = {a: r for a, r in named.items() if r is not Role.STORE}
        touched = {a for a in before.keys() | after.keys() if before.get(a) is not after.get(a)}
        touched.update(restored)
        refused = self._fleet.follow(
            {address: role for address, role in before.items() if address in touched},
            {address: role for address, role in after.items() if address in touched},
        )
        # Those that did not fit are tried again at the next change.
        self._members = {a: r for a, r in after.items() if a not in refused}
