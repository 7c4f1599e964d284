"""Runs the sources of one router, each in a task of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Final

from kvrouter.membership.discovery.merge import MergedSources
from kvrouter.membership.fleet import MAX_ENGINES
from kvrouter.telemetry.series import Reading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvrouter.membership.discovery.base import EngineSource
    from kvrouter.membership.discovery.merge import SourceStatus
    from kvrouter.membership.fleet import Fleet

FIRST_REPORT_S: Final = 2.0
"""How long the start waits for the sources' first reports; later ones count as well."""
RESTART_S: Final = 1.0
"""Between two runs of a source that failed unexpectedly."""

log = logging.getLogger(__name__)


class Discovery:
    """Brings what all sources name to its place, on the running loop. `start`, then `close`.

    fleet, follow_nodes: see `MergedSources`.
    """

    def __init__(
        self,
        fleet: Fleet,
        sources: Iterable[EngineSource],
        *,
        first_report_s: float = FIRST_REPORT_S,
        restart_s: float = RESTART_S,
        follow_nodes: Callable[[list[str]], None] = lambda urls: None,
    ) -> None:
        self.merged = MergedSources(fleet, follow_nodes)
        self._fleet = fleet
        self._sources = tuple(sources)
        self._first_report_s = first_report_s
        self._restart_s = restart_s
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Follow the sources; returns when each has reported, or after `first_report_s`."""
        for source in self._sources:
            follow = self._follow(source, self.merged.add(source.name))
            self._tasks.append(asyncio.create_task(follow, name=f"discovery {source.name}"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._first_report_s):
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
            lambda: self._fleet.refused,
            grows=True,
        )

    async def _follow(self, source: EngineSource, status: SourceStatus) -> None:
        while True:
            try:
                await source.follow(status)
            except Exception as error:  # a defect in one source must not end the others
                log.exception("discovery %s", source.name)
                status.failed(repr(error))
            await asyncio.sleep(self._restart_s)
