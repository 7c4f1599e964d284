"""Redis and Valkey as a tier, one server or a cluster, by redis-py.

    redis://[[USER]:PASSWORD@]HOST:PORT[/DB]    rediss:// for TLS
    redis+cluster://HOST:PORT,HOST:PORT         any of its nodes

`valkey` may stand for `redis`. `?ttl=SECONDS` lets values expire; further options are redis-py's.
Keys have no hash tags: a prefix is spread over the masters. A master that is away costs its keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, TypeVar
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
from kvrouter_store.tiers.redis_link import MOVED, RedisLink, RedisLinks, Server

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from redis.asyncio.cluster import RedisCluster

ANSWER_TIMEOUT_S: Final = 0.4
"""Of one server, less than a tier's deadline: the answers of other masters still count."""
MAP_PAUSE_S: Final = 1.0
"""Between two readings of the cluster's map, while a master is away."""
OPTIONS: Final[dict[str, Any]] = {
    "socket_timeout": ANSWER_TIMEOUT_S,
    "socket_connect_timeout": ANSWER_TIMEOUT_S,
    "protocol": 2,
    "client_name": "kvrouter",
}
PROBES: Final = [f"kvrouter:1:{number}" for number in range(64)]
"""Keys of all masters of a cluster: one of them must answer. Nothing has them."""
T = TypeVar("T")
R = TypeVar("R")
log = logging.getLogger(__name__)


class RedisTier:
    """Values are strings, written with SET and read with GET, many in one pipeline."""

    def __init__(self, url: str) -> None:
        check_package(url, "redis", "redis[hiredis]")
        self.name = shown(url)
        self._cluster = urlsplit(url).scheme.endswith("+cluster")
        self._urls, ttl = _read(url, self.name)
        self._expiry = ("EX", str(ttl)) if ttl else ()
        self._links: RedisLinks | None = None
        self._map: RedisCluster | None = None
        self._reading: asyncio.Task[None] | None = None
        self._read_at = 0.0
        self._lost: set[Server] = set()  # whose last call failed
        self._said: set[str] = set()  # kinds of errors that the log has

    async def start(self, memory: Memory) -> None:
        """Have a server answer, which would also store."""
        self._lost.clear()
        self._said.clear()
        self._links = RedisLinks(self._connection, memory.view, self._hear)
        self._map = self._cluster_map() if self._cluster else None
        await self._at_masters(PROBES, PROBES, RedisLink.probe, False)

    async def holds(self, keys: Sequence[str]) -> list[bool]:
        """By EXISTS."""
        return await self._at_masters(keys, keys, RedisLink.holds, False)

    async def load(self, items: Sequence[Item]) -> list[TierStatus]:
        """By GET."""
        keys = [item.key for item in items]
        return await self._at_masters(keys, items, RedisLink.load, TierStatus.FAILED)

    async def store(self, items: Sequence[Item]) -> list[TierStatus]:
        """By SET."""

        def store(link: RedisLink, some: Sequence[Item]) -> list[TierStatus]:
            return link.store(some, self._expiry)

        keys = [item.key for item in items]
        return await self._at_masters(keys, items, store, TierStatus.FAILED)

    async def drop(self, keys: Sequence[str]) -> None:
        """By DEL."""
        await self._at_masters(keys, keys, RedisLink.drop, b"")

    async def stop(self) -> None:
        """Close the connections."""
        links, self._links = self._links, None
        known, self._map = self._map, None
        if links is not None:
            links.close()
        with contextlib.suppress(Exception):
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                if self._reading is not None:
                    self._reading.cancel()
                    await asyncio.wait({self._reading})
                if known is not None:
                    await known.aclose()

    async def _at_masters(
        self,
        keys: Sequence[str],
        what: Sequence[T],
        call: Callable[[RedisLink, Sequence[T]], Sequence[R]],
        lost: R,
    ) -> list[R]:
        """The answer for each key, or `lost`, of the master of each: one's failure does not spread.

        TierAway once the last call to each master has failed.

        what: of each key, what the call over a link is told.
        """
        groups = await self._by_master(keys)
        links = self._links
        if links is None:
            raise TierAway("it is not connected")
        calls = [
            links.call(server, call, [what[k] for k in group]) for server, group in groups.items()
        ]
        answers, errors = [lost] * len(keys), {}
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        if self._links is not links:
            raise TierAway("it was stopped")
        for (server, group), outcome in zip(groups.items(), outcomes, strict=True):
            if isinstance(outcome, BaseException):
                errors[server] = _away(outcome)
            else:
                self._lost.discard(server)
                for k, answer in zip(group, outcome, strict=True):
                    answers[k] = answer
        if errors:
            self._lose(errors)
        return answers

    async def _by_master(self, keys: Sequence[str]) -> dict[Server, Sequence[int]]:
        """The places of keys, by their master; of those that have one."""
        from redis.exceptions import SlotNotCoveredError  # noqa: PLC0415

        known = self._map
        if known is None:
            return {None: range(len(keys))}
        try:
            await _begin(known)
        except Exception as error:
            raise _away(error) from None
        groups: defaultdict[Server, list[int]] = defaultdict(list)
        for k, key in enumerate(keys):
            try:
                master: Any = known.get_node_from_key(key)
            except SlotNotCoveredError:
                self._read_map_soon()
            else:
                groups[master.host, master.port].append(k)
        return dict(groups)

    def _lose(self, errors: dict[Server, TierAway]) -> None:
        """Go on without these masters. TierAway where none is left."""
        new = errors.keys() - self._lost
        self._lost |= new
        masters = [None] if self._map is None else self._map.get_primaries()
        if all((each and (each.host, each.port)) in self._lost for each in masters):
            raise next(iter(errors.values()))
        for server in new:
            place = ":".join(map(str, server or ()))
            log.warning("%s goes on without %s and its keys: %s", self.name, place, errors[server])
        self._read_map_soon()

    def _hear(self, error: str) -> None:
        """What a server has said instead of an answer: once of each kind into the log."""
        kind = error.partition(" ")[0]
        if kind in MOVED and self._map is None:
            raise TierAway("it is a server of a cluster: write redis+cluster://HOST:PORT")
        if kind in MOVED:
            self._read_map_soon()
        elif kind not in self._said:
            self._said.add(kind)
            log.warning("%s refuses values: %s", self.name, error)

    def _cluster_map(self) -> RedisCluster:
        from redis.asyncio.cluster import ClusterNode, RedisCluster  # noqa: PLC0415
        from redis.asyncio.connection import parse_url  # noqa: PLC0415
        from redis.asyncio.retry import Retry  # noqa: PLC0415
        from redis.backoff import NoBackoff  # noqa: PLC0415

        places = [parse_url(url) for url in self._urls]
        return RedisCluster.from_url(
            self._urls[0],
            startup_nodes=[ClusterNode(str(one["host"]), one.get("port", 6379)) for one in places],
            require_full_coverage=False,
            retry=Retry(NoBackoff(), 0),
            **OPTIONS,
        )

    def _connection(self, server: Server) -> Any:
        from redis.backoff import NoBackoff  # noqa: PLC0415
        from redis.connection import ConnectionPool  # noqa: PLC0415
        from redis.retry import Retry  # noqa: PLC0415

        pool = ConnectionPool.from_url(self._urls[0], **OPTIONS, retry=Retry(NoBackoff(), 0))
        place = {} if server is None else {"host": server[0], "port": server[1]}
        return pool.connection_class(**pool.connection_kwargs | place)

    def _read_map_soon(self) -> None:
        """A replica may have become the master of what was lost, or a slot has moved."""

        async def read(known: RedisCluster) -> None:
            with contextlib.suppress(Exception):
                await known.nodes_manager.initialize()

        reading = self._reading is not None and not self._reading.done()
        if self._map is not None and not reading and time.monotonic() - self._read_at > MAP_PAUSE_S:
            self._read_at = time.monotonic()
            self._reading = asyncio.create_task(read(self._map))


def _away(error: BaseException) -> TierAway:
    """What a server's failure means. Raises what is none."""
    from redis.exceptions import RedisError  # noqa: PLC0415

    if not isinstance(error, RedisError | OSError):
        raise error
    return TierAway(str(error))


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
        if "protocol" in options:
            raise ValueError("leave out protocol, which is always 2")
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
