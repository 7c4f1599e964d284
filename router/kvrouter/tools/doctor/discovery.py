"""Engines that discovery sources name: each source is read once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvrouter.membership.discovery import make_source
from kvrouter.membership.discovery.base import Members, SourceContext
from kvrouter.redis.client import RedisClient
from kvrouter.tools.doctor.base import Found, Setup, error, warning

if TYPE_CHECKING:
    from kvrouter.engines.engine import Role

FIRST_MEMBERS_S: Final = 10.0


@dataclass(slots=True)
class FirstMembers:
    """The first that a source reported: roles by address, or the problem why it cannot be read.

    It listens to the source until `came` is set.
    """

    name: str
    members: dict[str, Role] = field(default_factory=dict)
    problem: str | None = None
    came: asyncio.Event = field(default_factory=asyncio.Event)

    def named(self, members: Members, *, restore: bool = False) -> None:
        """The source names these engines."""
        self.members = dict(members)
        self.came.set()

    def failed(self, problem: str) -> None:
        """The source cannot be read."""
        self.problem = problem
        self.came.set()


async def read_sources(setup: Setup) -> list[FirstMembers]:
    """The first members of every source of --discovery; never raises for what a source does.

    What a source knows besides is added to `bootstrap_ports` and `nodes`.
    """
    settings = setup.settings
    url = settings.redis.get_secret_value()
    client = RedisClient(url) if url else None
    context = SourceContext(client, settings.redis_prefix, setup.bootstrap_ports, setup.nodes)
    try:
        return await asyncio.gather(*(_read(text, context) for text in settings.discovery))
    finally:
        if client is not None:
            await client.close()


async def _read(text: str, context: SourceContext) -> FirstMembers:
    source = make_source(text, context)
    first = FirstMembers(source.name)
    following = asyncio.create_task(source.follow(first))
    came = asyncio.create_task(first.came.wait())
    both = (following, came)
    try:
        await asyncio.wait(both, timeout=FIRST_MEMBERS_S, return_when=asyncio.FIRST_COMPLETED)
        if not first.came.is_set():
            broken = following.exception() if following.done() else None
            silent = f"it names no members within {FIRST_MEMBERS_S:g} s"
            first.problem = f"it fails: {broken!r}" if broken else silent
    finally:
        for task in both:
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)
    return first


async def discovery(setup: Setup) -> Found:
    """Every source of --discovery can be read and names engines."""
    for each in setup.discovered:
        subject = f"--discovery {each.name}"
        if each.problem is not None:
            yield error(
                subject,
                f"it cannot be read: {each.problem}",
                "correct what the sentence names; the router keeps the members that it knows, and "
                "waits",
            )
        elif not each.members:
            yield warning(subject, "it names no member", "add engines to it, or leave it out")
