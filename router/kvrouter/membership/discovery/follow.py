"""Runs the sources of one router, its own flags too, each in a task of its own.

`MergedSources`, a synchronous state machine, combines what all sources name: an engine or store
node stays while any of them names it. It passes only differences to the fleet: an engine that was
added or removed by hand stays so until a source changes what it names.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvrouter.engines.engine import Role
from kvrouter.membership.discovery.base import MAX_MEMBERS, both_roles
from kvrouter.membership.fleet import MAX_ENGINES
from kvrouter.telemetry.series import Reading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvrouter.membership.discovery.base import EngineSource, Listener, Members
    from kvrouter.membership.fleet import Fleet

MAX_NODES: Final = 256
"""Nodes of the store, of all sources together: each request may ask all of them."""
FIRST_REPORT_S: Final = 2.0
"""How long the start waits for the sources' first reports; later ones count as well."""
RESTART_S: Final = 1.0  # between two runs of a source that failed unexpectedly
log = logging.getLogger(__name__)


class FlagsSource:
    """Names the members of --prefill, --decode and --store. It cannot fail."""

    def __init__(self, members: Members) -> None:
        self.name = "flags"
        self._members = members
        self._listener: Listener | None = None

    def set(self, members: Members) -> None:
        """Name these engines from now on; those removed by other means come back."""
        self._members = members
        if self._listener is not None:
            self._listener.named(members, restore=True)

    async def follow(self, listener: Listener) -> None:
        """See `EngineSource`."""
        self._listener = listener
        listener.named(self._members)
        try:
            await asyncio.Event().wait()  # only `set` changes them
        finally:
            self._listener = None


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
        if len(members) > MAX_MEMBERS:
            self.failed(f"it names {len(members)} members; {MAX_MEMBERS} is the most")
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


@dataclass(eq=False)
class MergedSources:
    """What sources name: engines go to `fleet`, all URLs of store nodes to `follow_nodes`."""

    fleet: Fleet
    follow_nodes: Callable[[list[str]], None]
    statuses: list[SourceStatus] = field(default_factory=list, init=False)  # by source, in order
    _members: dict[str, Role] = field(default_factory=dict, init=False)  # engines
    _nodes: list[str] = field(default_factory=list, init=False)

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
            self.follow_nodes(used)
        before = self._members
        after: dict[str, Role] = {a: r for a, r in named.items() if r is not Role.STORE}
        touched = {a for a in before.keys() | after.keys() if before.get(a) is not after.get(a)}
        touched.update(restored)
        refused = self.fleet.follow(
            {address: role for address, role in before.items() if address in touched},
            {address: role for address, role in after.items() if address in touched},
        )
        # Those that did not fit are tried again at the next change.
        self._members = {a: r for a, r in after.items() if a not in refused}


@dataclass(eq=False)
class Discovery:
    """Brings what all sources name to its place, on the running loop. `start`, then `close`.

    fleet, follow_nodes: see `MergedSources`.
    """

    fleet: Fleet
    sources: Sequence[EngineSource]
    first_report_s: float = FIRST_REPORT_S
    restart_s: float = RESTART_S
    follow_nodes: Callable[[list[str]], None] = lambda urls: None

    def __post_init__(self) -> None:
        self.merged = MergedSources(self.fleet, self.follow_nodes)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Follow the sources; returns when each has reported, or after `first_report_s`."""
        for source in self.sources:
            follow = self._follow(source, self.merged.add(source.name))
            self._tasks.append(asyncio.create_task(follow, name=f"discovery {source.name}"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.first_report_s):
                for status in self.merged.statuses:
                    await status.reported.wait()

    async def close(self) -> None:
        """Stop following; the engines stay as they are. Idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def readings(self) -> Iterator[Reading]:
        """Metrics of the sources."""
        statuses = self.merged.statuses
        yield Reading(
            "kvrouter:discovery_up",
            "Whether the source could be read when that was tried last.",
            lambda: (((status.name,), float(status.up)) for status in statuses),
            ["source"],
        )
        yield Reading(
            "kvrouter:discovery_engines",
            "Engines and store nodes that the source named last.",
            lambda: (((status.name,), float(len(status.members))) for status in statuses),
            ["source"],
        )
        yield Reading(
            "kvrouter:engines_refused",
            f"Engines of any source that were not added because there were {MAX_ENGINES}, at each "
            "try.",
            lambda: self.fleet.refused,
            grows=True,
        )

    async def _follow(self, source: EngineSource, status: SourceStatus) -> None:
        while True:
            try:
                await source.follow(status)
            except Exception as error:  # a defect in one source must not end the others
                log.exception("discovery %s", source.name)
                status.failed(repr(error))
            await asyncio.sleep(self.restart_s)
