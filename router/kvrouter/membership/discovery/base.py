"""The interface between the router and sources of engines.

A source names all of its engines whenever it has read them, and reports when it cannot. It knows
nothing of other sources or of the pool.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from kvrouter.engines.engine import Role
from kvrouter.membership.fleet import MAX_ENGINES
from kvrouter.options.addresses import parse_address, unlabelled
from kvrouter_store.connection.address import parse_url

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvrouter.redis.client import RedisClient


@dataclass(frozen=True, slots=True)
class SourceContext:
    """What a source uses of its router."""

    link: RedisClient | None = None  # the Redis of `--redis`, which the router owns; None: none
    prefix: str = "kvrouter"  # of its keys there
    # By `HOST:PORT`, under "" that of all others; earlier maps win, and a source that knows such
    # ports appends a map.
    bootstrap_ports: ChainMap[str, int] = field(default_factory=ChainMap)
    # The same of URLs of store nodes on the hosts of engines, by `HOST:PORT`.
    nodes: ChainMap[str, str] = field(default_factory=ChainMap)


Members = Mapping[str, Role]
"""Every engine and store node of one source: its role by its `member_address`."""

MAX_MEMBERS: Final = MAX_ENGINES  # of one source, store nodes too; with more it counts as broken


class Listener(Protocol):
    """Receives the reports of one source. Synchronous; never raises."""

    def named(self, members: Members, *, restore: bool = False) -> None:
        """The source was read, and these are all of its engines; repeats are harmless.

        Args:
            members: may be empty if the source knows for certain that there are none.
            restore: an operator has just set them: engines removed by other means come back.
        """

    def failed(self, problem: str) -> None:
        """The source could not be read: its engines stay. `problem` says what to fix."""


class EngineSource(Protocol):
    """Where engines come from."""

    name: str  # for metrics and log; unique among the sources of one router, and no secret

    async def follow(self, listener: Listener) -> None:
        """Report every change to `listener` until cancelled, within a time that the source states.

        The first report comes at once. The source retries for ever, with pauses, and frees all it
        holds when it is cancelled.
        """


def member_address(text: str, role: Role) -> str:
    """The one form of an engine's address, or of the URL of a store node.

    ValueError: a sentence with the remedy.
    """
    if role is not Role.STORE:
        return parse_address(text)
    return str(parse_url(text if "://" in text else f"kv://{text}"))


def both_roles(named: Iterable[tuple[str, Role]]) -> dict[str, Role]:
    """Members of (address, role); an address with different roles gets both, and one label."""
    members: dict[str, tuple[str, Role]] = {}
    for address, role in named:
        place = unlabelled(address)
        form, known = members.get(place, (address, role))
        members[place] = form if form != place else address, role if known is role else Role.BOTH
    return dict(members.values())
