"""Engines that come from elsewhere than flags: each source is read once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvrouter.membership.discovery import make_source
from kvrouter.tools.doctor.base import Check, SetUp, error, warning

if TYPE_CHECKING:
    from kvrouter.app.settings import RouterSettings
    from kvrouter.engines.engine import Role
    from kvrouter.membership.discovery.base import Members
    from kvrouter.tools.doctor.base import Found

FIRST_WORD_S: Final = 10.0


@dataclass(slots=True)
class Sourced:
    """What one source said first.

    Attributes:
        name: the source's.
        members: the role of each engine that it named, by its address.
        problem: why it could not be read; None where it could.
    """

    name: str
    members: dict[str, Role] = field(default_factory=dict)
    problem: str | None = None


class _FirstWord:
    """A listener that awaits the first thing it is told."""

    def __init__(self, name: str) -> None:
        self.said = Sourced(name)
        self.came = asyncio.Event()

    def named(self, members: Members, *, anew: bool = False) -> None:
        self.said.members = dict(members)
        self.came.set()

    def failed(self, problem: str) -> None:
        self.said.problem = problem
        self.came.set()


async def read_sources(settings: RouterSettings) -> list[Sourced]:
    """The first word of every source, each within a few seconds. Never raises for what they do."""
    return list(await asyncio.gather(*(_first_word(text) for text in settings.discovery)))


async def _first_word(text: str) -> Sourced:
    source = make_source(text)
    listener = _FirstWord(source.name)
    following = asyncio.create_task(source.follow(listener))
    came = asyncio.create_task(listener.came.wait())
    try:
        await asyncio.wait(
            {following, came}, timeout=FIRST_WORD_S, return_when=asyncio.FIRST_COMPLETED
        )
        if not listener.came.is_set():
            broken = following.exception() if following.done() else None
            said = f"it fails: {broken!r}" if broken else f"it says nothing in {FIRST_WORD_S:g} s"
            listener.said.problem = said
    finally:
        for task in (following, came):
            task.cancel()
        await asyncio.gather(following, came, return_exceptions=True)
    return listener.said


async def _sources(setup: SetUp) -> Found:
    for each in setup.sourced:
        subject = f"--discovery {each.name}"
        if each.problem is not None:
            yield error(
                subject,
                f"it cannot be read: {each.problem}",
                "mend what the sentence names; the router keeps what was named last, and waits",
            )
        elif not each.members:
            yield warning(
                subject, "it names no engine", "see that it names engines, or leave it out"
            )


CHECKS: Final = (
    Check("discovery", "every source of --discovery can be read, and names engines", _sources),
)
