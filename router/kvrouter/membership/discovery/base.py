"""The seam between the router and whatever knows which engines there are.

A source names all of its engines whenever it has read them, and says so when it cannot. It knows
nothing of other sources, of the pool, or of what becomes of an engine that it names no longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from kvrouter.engines.engine import Role

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvrouter.redis.connection import RedisLink


@dataclass(frozen=True, slots=True)
class RedisAccess:
    """What of the router's a source may use; the router owns it.

    Attributes:
        redis: the link to the Redis of `--redis`, or None.
        redis_prefix: begins all keys there.
    """

    redis: RedisLink | None = None
    redis_prefix: str = "kvrouter"


Members = Mapping[str, Role]
"""Every engine of one source: its role by its address, `HOST:PORT`."""

MAX_MEMBERS: Final = 4096
"""Engines that one source may name; more are a mistake, and bring nothing but probes."""


class Listener(Protocol):
    """Is told by one source. Synchronous; never raises."""

    def named(self, members: Members, *, anew: bool = False) -> None:
        """The source was read: these are all of its engines, be it as many times as it likes.

        Args:
            members: may be empty, where the source knows for certain that there are none.
            anew: an operator has just said them; also who was removed otherwise is to come back.
        """

    def failed(self, problem: str) -> None:
        """The source could not be read: what it named last stays.

        Args:
            problem: in a sentence, with what an operator needs to mend it.
        """


class EngineSource(Protocol):
    """Where engines come from.

    Attributes:
        name: what metrics and log call it; unique among the sources of one router, and no secret.
    """

    name: str

    async def follow(self, listener: Listener) -> None:
        """Tell `listener` of every change until cancelled, within a time that the source states.

        The first word comes without a change: the engines, or what is wrong. What cannot be read
        is tried again for ever, with pauses. Gives back all it holds when it is cancelled.
        """


def both_roles(said: Iterable[tuple[str, Role]]) -> dict[str, Role]:
    """Members of (address, role); one that is said with different roles takes both legs."""
    members: dict[str, Role] = {}
    for address, role in said:
        members[address] = role if members.get(address, role) is role else Role.BOTH
    return members


def too_many(members: Members) -> str | None:
    """What to say of more engines than a source may name; None where they are not."""
    if len(members) <= MAX_MEMBERS:
        return None
    return f"it names {len(members)} engines; {MAX_MEMBERS} is the most"
