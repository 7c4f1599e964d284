"""Engines that registered themselves in Redis, each with a time to live.

The data in Redis, which `kvrouter register` and other programs write: `PREFIX:engines`, a set of
addresses; `PREFIX:engine:HOST:PORT`, an entry as JSON that expires; and the channel
`PREFIX:engines:news`, where a message means "look again".
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from kvrouter.engines.engine import Role  # noqa: TC001 (msgspec reads it)
from kvrouter.membership.discovery.base import MAX_MEMBERS, SourceContext, member_address
from kvrouter.redis.client import RedisFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvrouter.membership.discovery.base import Listener, Members
    from kvrouter.redis.client import RedisClient

LOOK_S: Final = 1.0  # between two looks at all entries, unless news asks for one sooner
RETRY_S: Final = 0.25
MAX_TTL_S: Final = 3600.0
_KEYS_AT_A_TIME: Final = 256
_ENTRY_BYTES: Final = 4096
_NAME_BYTES: Final = 400  # of an address with its label; what is longer is none

log = logging.getLogger(__name__)


class EngineEntry(msgspec.Struct, frozen=True):
    """The entry of an engine or a store node; unknown members are ignored."""

    role: Role
    state: Literal["up", "leaving"] = "up"  # "leaving": it is to drain
    ttl_s: float = 15.0  # seconds until it expires

    @property
    def lasts_s(self) -> float:
        """Its time to live, within bounds."""
        return min(max(self.ttl_s, 0.0), MAX_TTL_S)


class EntryKeys:
    """Keys and channel under one prefix."""

    def __init__(self, prefix: str) -> None:
        self.engines = f"{prefix}:engines"  # the set of all addresses
        self.news = f"{prefix}:engines:news"  # the channel of changes
        self._entry = f"{prefix}:engine:"

    def entry(self, address: str) -> str:
        """The key of one engine."""
        return self._entry + address


class EntryGrace:
    """Keeps entries for a while that Redis has lost. A synchronous state machine.

    An entry that vanished without "leaving" is kept for its time to live once more, counted only
    while Redis can be read: after a restart without data, engines have that long to register again.
    Health checks find out meanwhile whether such an engine is alive.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Role, float]] = {}  # and the seconds left
        self._read_at: float | None = None

    def unreachable(self) -> None:
        """While Redis cannot be read, times to live are frozen."""
        self._read_at = None

    def read(self, now: float, entries: Mapping[str, EngineEntry]) -> Members:
        """The engines that exist, by the entries read at `now` (seconds, monotonic)."""
        passed_s = min(now - self._read_at, 2 * LOOK_S) if self._read_at is not None else 0.0
        self._read_at = now
        lost = {a: (role, s - passed_s) for a, (role, s) in self._kept.items() if a not in entries}
        self._kept = {a: (role, left_s) for a, (role, left_s) in lost.items() if left_s > 0}
        for address, entry in entries.items():
            if entry.state == "up":
                self._kept[address] = entry.role, entry.lasts_s
        return {address: role for address, (role, _) in self._kept.items()}


class RedisSource:
    """Follows the entries: at once by news, else by a look every second.

    `text` must be "redis", for the Redis of `--redis`, else a ValueError.
    """

    def __init__(
        self, text: str, context: SourceContext, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if text != "redis":
            raise ValueError("give --discovery redis for the Redis of --redis URL")
        self.name = "redis"
        self._link = context.link
        self._keys = EntryKeys(context.prefix)
        self._clock = clock
        self._odd: set[tuple[str, bytes]] = set()

    async def follow(self, listener: Listener) -> None:
        """See `EngineSource`. Reports news at once, and lost news within a second."""
        link = self._link
        if link is None:
            raise RuntimeError("the source has no connection to Redis")
        look, grace, problem = asyncio.Event(), EntryGrace(), ""
        listening = asyncio.create_task(
            link.listen([self._keys.news], lambda channel, message: look.set(), look.set),
            name="discovery redis news",
        )
        try:
            while True:
                look.clear()
                try:
                    entries = await self._entries(link)
                except RedisFailed as error:
                    grace.unreachable()
                    problem = str(error)
                    listener.failed(problem)
                else:
                    problem = ""
                    listener.named(grace.read(self._clock(), entries))
                with suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_S if problem else LOOK_S):
                        await look.wait()
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    async def _entries(self, link: RedisClient) -> dict[str, EngineEntry]:
        """All entries by address; RedisFailed: they cannot be read."""
        # Not SMEMBERS and MGET: a set or a value of any size would keep the event loop.
        members = await link.call("SRANDMEMBER", self._keys.engines, MAX_MEMBERS + 1)
        short = (member for member in members if len(member) <= _NAME_BYTES)
        named = sorted(member.decode("utf-8", "replace") for member in short)
        entries: dict[str, EngineEntry] = {}
        for at in range(0, len(named), _KEYS_AT_A_TIME):
            some = named[at : at + _KEYS_AT_A_TIME]
            values = await link.batch(
                [("GETRANGE", self._keys.entry(name), 0, _ENTRY_BYTES) for name in some]
            )
            entries |= self._read(dict(zip(some, values, strict=True)))
            if gone := [name for name, value in zip(some, values, strict=True) if not value]:
                # An engine that is alive adds itself again with its next renewal.
                await link.call("SREM", self._keys.engines, *gone)
        return entries

    def _read(self, values: Mapping[str, bytes]) -> dict[str, EngineEntry]:
        """The entries that can be read; others are logged once and left out."""
        entries = {}
        for name, value in values.items():
            if not value:
                continue
            try:
                entry = msgspec.json.decode(value, type=EngineEntry)
                entries[member_address(name, entry.role)] = entry
            except (ValueError, RecursionError) as error:
                if (name, value) not in self._odd and len(self._odd) < MAX_MEMBERS:
                    self._odd.add((name, value))
                    log.warning("discovery redis: the entry of %s is left out: %s", name, error)
        return entries
