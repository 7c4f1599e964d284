"""Engines that come from elsewhere than flags: each source is read once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvrouter.discovery import make_source
from kvrouter.doctor.base import Check, Finding, SetUp, Severity

if TYPE_CHECKING:
    from kvrouter.config import RouterSettings
    from kvrouter.discovery.base import Members
    from kvrouter.engine import Role

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


async def _sources(setup: SetUp) -> list[Finding]:
    found = []
    for each in setup.sourced:
        subject = f"--discovery {each.name}"
        if each.problem is not None:
            remedy = "mend what the sentence names; the router keeps what was named last, and waits"
            found.append(
                Finding(Severity.ERROR, subject, f"it cannot be read: {each.problem}", remedy)
            )
        elif not each.members:
            remedy = "see that it names engines, or leave it out"
            found.append(Finding(Severity.WARNING, subject, "it names no engine", remedy))
    return found


CHECKS: Final = (
    Check("discovery", "every source of --discovery can be read, and names engines", _sources),
)
