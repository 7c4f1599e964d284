"""Runs the sources of one router, each in a task of its own, for as long as the router runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Final

from kvrouter.membership.discovery.merge import Membership
from kvrouter.telemetry.metrics import Reading

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvrouter.membership.discovery.base import EngineSource
    from kvrouter.membership.discovery.merge import Voice
    from kvrouter.membership.fleet import Fleet
    from kvrouter.telemetry.metrics import Row

FIRST_WORD_S: Final = 2.0
"""How long the start waits for what sources say first; who is later is heard all the same."""
_RESTART_S: Final = 1.0

log = logging.getLogger(__name__)


class Discovery:
    """Follows all sources. `start`, then `close`; both on the running loop.

    Args:
        fleet: is brought to what the sources name.
        sources: where engines come from; each is followed until `close`.
    """

    def __init__(self, fleet: Fleet, sources: Iterable[EngineSource]) -> None:
        self.membership = Membership(fleet)
        self._sources = tuple(sources)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Follow them from now on; returns when each has said something, or took too long."""
        for source in self._sources:
            follow = self._follow(source, self.membership.voice(source.name))
            self._tasks.append(asyncio.create_task(follow, name=f"discovery {source.name}"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_WORD_S):
                for voice in self.membership.voices():
                    await voice.heard.wait()

    async def close(self) -> None:
        """Follow none any more; the engines stay as they are. Idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def readings(self) -> Iterator[Reading]:
        """Metrics of the sources."""
        yield Reading(
            "kvrouter:discovery_up",
            "Whether the source of engines could be read when that was tried last.",
            self._ups,
            ["source"],
        )
        yield Reading(
            "kvrouter:discovery_engines",
            "Engines that the source named last.",
            self._engines,
            ["source"],
        )

    async def _follow(self, source: EngineSource, voice: Voice) -> None:
        while True:
            try:
                await source.follow(voice)
            except Exception as error:  # one odd source must not end the others, or itself
                log.exception("discovery %s", source.name)
                voice.failed(repr(error))
            await asyncio.sleep(_RESTART_S)

    def _ups(self) -> Iterator[Row]:
        for voice in self.membership.voices():
            yield (voice.name,), float(voice.up)

    def _engines(self) -> Iterator[Row]:
        for voice in self.membership.voices():
            yield (voice.name,), float(len(voice.members))
