"""Redis and Valkey as a tier, one server or a cluster, by redis-py.

    redis://[[USER]:PASSWORD@]HOST:PORT[/DB]    rediss:// for TLS
    redis+cluster://HOST:PORT,HOST:PORT         any of its nodes

`valkey` may stand for `redis`. `?ttl=SECONDS` lets values expire; further options are redis-py's.
Keys have no hash tags: a prefix is spread over the masters. A master that is away costs its keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from kvrouter_store.tiers.base import (
    Item,
    Memory,
    TierAway,
    TierRefused,
    TierStatus,
    check_package,
    shown,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from redis.asyncio import Redis
    from redis.asyncio.cluster import RedisCluster

ANSWER_TIMEOUT_S: Final = 0.4
"""Of one server, less than a tier's deadline: the answers of other masters still count."""
MAP_PAUSE_S: Final = 1.0
"""Between two readings of the cluster's map, while a master is away."""
PROBES: Final = [f"kvrouter:{number}" for number in range(64)]
"""Keys of all masters of a cluster: one of them must answer."""


class RedisTier:
    """Values are strings, written with SET and read with GET, many in one pipeline."""

    def __init__(self, url: str) -> None:
        check_package(url, "redis", "redis[hiredis]")
        self.name = shown(url)
        self._cluster = urlsplit(url).scheme.endswith("+cluster")
        self._urls, ttl = _read(url, self.name)
        self._expiry = ("EX", ttl) if ttl else ()
        self._client: Redis | RedisCluster | None = None
        self._memory: Memory | None = None
        self._copies: list[bytearray] = []
        self._map_at = 0.0
        self._map: asyncio.Task[None] | None = None

    async def start(self, memory: Memory) -> None:
        """Make a client, and have a server answer."""
        self._memory = memory
        self._client = self._connect()
        await self.holds(PROBES)

    async def holds(self, keys: Sequence[str]) -> list[bool]:
        """By EXISTS."""
        return [found == 1 for found in await self._ask([("EXISTS", key) for key in keys])]

    async def load(self, items: Sequence[Item]) -> list[TierStatus]:
        """By GET. The memory is written here, after the answer."""
        values = await self._ask([("GET", item.key) for item in items])
        return [self._take(item, value) for item, value in zip(items, values, strict=True)]

    async def store(self, items: Sequence[Item]) -> list[TierStatus]:
        """By SET. A copy is sent: a connection that is closed may still send for a while.

        Its memory is used again after all answers: getting more would take longer than the copy.
        """
        assert self._memory is not None
        size = sum(item.size for item in items)
        copy = self._copies.pop() if self._copies else bytearray()
        if len(copy) < size:
            copy = bytearray(size)
        values = zip(items, _copied(self._memory.view, items, copy), strict=True)
        answers = await self._ask([("SET", item.key, one, *self._expiry) for item, one in values])
        refused = [isinstance(answer, Exception) for answer in answers]
        if not any(refused):
            self._copies.append(copy)
        return [TierStatus.FAILED if one else TierStatus.OK for one in refused]

    async def drop(self, keys: Sequence[str]) -> None:
        """By DEL."""
        await self._ask([("DEL", key) for key in keys])

    async def stop(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if self._map is not None:
            self._map.cancel()
        if client is not None:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    await client.aclose()

    def _take(self, item: Item, value: object) -> TierStatus:
        if value is None:
            return TierStatus.MISSING
        if self._memory is None or not isinstance(value, bytes) or len(value) != item.size:
            return TierStatus.FAILED
        self._memory.view[item.at : item.at + item.size] = value
        return TierStatus.OK

    async def _ask(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The answer to each command, or the exception that came instead."""
        from redis.exceptions import (  # noqa: PLC0415
            ClusterDownError,
            ConnectionError,
            RedisError,
            TimeoutError,
        )

        client = self._client
        if client is None:
            raise TierAway("it is not connected")
        try:
            groups = await self._by_master(client, commands)
        except (RedisError, OSError) as error:
            raise TierAway(str(error)) from None
        answers: list[Any] = [None] * len(commands)

        async def ask(group: Sequence[int]) -> None:
            pipeline = client.pipeline() if self._cluster else client.pipeline(transaction=False)
            for k in group:
                pipeline.execute_command(*commands[k])
            try:
                found = await pipeline.execute(raise_on_error=False)
            except (RedisError, OSError) as error:
                found = [error] * len(group)
            for k, answer in zip(group, found, strict=True):
                answers[k] = answer

        await asyncio.gather(*map(ask, groups))
        gone = (ConnectionError, TimeoutError, ClusterDownError, OSError)
        lost = [answer for answer in answers if isinstance(answer, gone)]
        if lost and len(lost) == len(answers):
            raise TierAway(str(lost[0]))
        if lost:
            self._read_map_soon(client)
        return answers

    async def _by_master(
        self, client: Any, commands: Sequence[tuple[Any, ...]]
    ) -> list[Sequence[int]]:
        """The places of commands, each group for one master, that one's failure may not spread."""
        if not self._cluster:
            return [range(len(commands))]
        await _begin(client)
        groups: dict[str, list[int]] = {}
        for k, command in enumerate(commands):
            groups.setdefault(client.get_node_from_key(command[1]).name, []).append(k)
        return list(groups.values())

    def _connect(self) -> Redis | RedisCluster:
        from redis.asyncio import Redis  # noqa: PLC0415
        from redis.asyncio.cluster import ClusterNode, RedisCluster  # noqa: PLC0415
        from redis.asyncio.connection import parse_url  # noqa: PLC0415
        from redis.asyncio.retry import Retry  # noqa: PLC0415
        from redis.backoff import NoBackoff  # noqa: PLC0415

        options: dict[str, Any] = {
            "socket_timeout": ANSWER_TIMEOUT_S,
            "socket_connect_timeout": ANSWER_TIMEOUT_S,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
            "client_name": "kvrouter",
        }
        if not self._cluster:
            return Redis.from_url(self._urls[0], **options)
        places = [parse_url(url) for url in self._urls]
        nodes = [ClusterNode(str(one["host"]), one.get("port", 6379)) for one in places]
        return RedisCluster.from_url(
            self._urls[0], startup_nodes=nodes, require_full_coverage=False, **options
        )

    def _read_map_soon(self, client: Any) -> None:
        """A replica may have become the master of what was lost."""

        async def read() -> None:
            with contextlib.suppress(Exception):
                await client.nodes_manager.initialize()

        if time.monotonic() - self._map_at > MAP_PAUSE_S:
            self._map_at = time.monotonic()
            self._map = asyncio.create_task(read())


def _copied(view: memoryview, items: Sequence[Item], copy: bytearray) -> Iterator[memoryview]:
    at, room = 0, memoryview(copy)
    for item in items:
        value = room[at : at + item.size]
        value[:] = view[item.at : item.at + item.size]
        yield value
        at += item.size


async def _begin(client: RedisCluster) -> None:
    """Read the cluster's map, from any node, where that is not done. RedisError where none answers.

    redis-py then asks the first master of the map which commands there are: the next, if that one
    is away.
    """
    from redis.exceptions import ConnectionError, TimeoutError  # noqa: PLC0415

    asked = set()
    while True:
        try:
            await client.initialize()
            return
        except (ConnectionError, TimeoutError, OSError):
            first = next((node.name for node in client.get_primaries()), None)
            if first is None or first in asked:
                raise
            asked.add(first)
            nodes = client.nodes_manager.nodes_cache
            nodes[first] = nodes.pop(first)  # the last to be asked


def _read(url: str, name: str) -> tuple[list[str], int]:
    """A URL of redis-py for each place, and the time to live. TierRefused where it is wrong."""
    from redis.asyncio.connection import Connection, parse_url  # noqa: PLC0415

    parts = urlsplit(url)
    scheme = parts.scheme.removesuffix("+cluster").replace("valkey", "redis")
    options = dict(parse_qsl(parts.query))
    user, at, places = parts.netloc.rpartition("@")
    try:
        ttl = options.pop("ttl", "0")
        if not all(places.split(",")) or not ttl.isdecimal():
            raise ValueError("it needs a host, and a ttl of whole seconds")
        query = urlencode(options)
        urls = [
            urlunsplit((scheme, f"{user}{at}{place}", parts.path, query, ""))
            for place in places.split(",")
        ]
        for each in urls:
            given: dict[str, Any] = dict(parse_url(each))
            given.pop("connection_class", Connection)(**given)  # takes these options; no I/O
    except (ValueError, TypeError) as error:
        raise TierRefused(f"--tier {name} is not understood: {error}") from None
    return urls, int(ttl)
