"""What all sources say, put together: an engine stays while any of them names it.

A synchronous state machine. It tells the fleet what differs and nothing else, so that an engine
that was removed or added by hand stays so until a source changes its mind about it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from kvrouter.membership.discovery.base import both_roles, too_many

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvrouter.engines.engine import Role
    from kvrouter.membership.discovery.base import Members
    from kvrouter.membership.fleet import Fleet

log = logging.getLogger(__name__)


class Voice:
    """What one source has said: its `Listener`.

    Attributes:
        name: of the source.
        members: the engines that it named last.
        problem: why it could not be read, when it was tried last; None where it was.
        heard: is set when it has said anything at all.
    """

    def __init__(self, name: str, changed: Callable[[Iterable[str]], None]) -> None:
        self.name = name
        self.members: Members = {}
        self.problem: str | None = None
        self.heard = asyncio.Event()
        self._changed = changed

    @property
    def up(self) -> bool:
        """Whether it was read when that was tried last."""
        return self.heard.is_set() and self.problem is None

    def named(self, members: Members, *, anew: bool = False) -> None:
        """See `Listener`."""
        if problem := too_many(members):
            self.failed(problem)
            return
        if self.problem is not None or members != self.members or not self.heard.is_set():
            log.info("discovery %s names %d engines", self.name, len(members))
        self.problem = None
        self.heard.set()
        if anew or members != self.members:
            self.members = dict(members)
            self._changed(members if anew else ())

    def failed(self, problem: str) -> None:
        """See `Listener`."""
        if problem != self.problem:
            log.warning(
                "discovery %s cannot be read, its %d engines stay: %s",
                self.name,
                len(self.members),
                problem,
            )
        self.problem = problem
        self.heard.set()


class Membership:
    """The engines that sources name.

    Args:
        fleet: is told which come, which go, and whose role is another.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._voices: list[Voice] = []
        self._members: dict[str, Role] = {}

    def voice(self, name: str) -> Voice:
        """The listener for one more source."""
        made = Voice(name, self._settle)
        self._voices.append(made)
        return made

    def voices(self) -> Iterator[Voice]:
        """What each source has said, in the order in which they were given."""
        yield from self._voices

    def _settle(self, anew: Iterable[str]) -> None:
        before = self._members
        after = both_roles(said for voice in self._voices for said in voice.members.items())
        self._members = after
        touched = {a for a in before.keys() | after.keys() if before.get(a) is not after.get(a)}
        touched.update(anew)
        self._fleet.follow(
            {address: role for address, role in before.items() if address in touched},
            {address: role for address, role in after.items() if address in touched},
        )
