"""No router of the group keeps another's loop from its streams, whatever it publishes."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from redis import Redis
from tests.fakes.patience import until
from tests.fakes.redis import MISSING, RedisServer, redis_server
from tests.integration.gaps.meter import MOST_S, GapMeter

from kvrouter.engines.engine import Engine
from kvrouter.engines.pool import EnginePool
from kvrouter.membership.fleet import MAX_ENGINES, Fleet
from kvrouter.prefix.index import PrefixIndex
from kvrouter.redis.client import RedisClient
from kvrouter.replicas.group import Group
from kvrouter.replicas.messages import MAX_RECEIVED_BYTES

OTHER = f"{7:016x}"
PATIENCE_S = 60


def envelope(*items: Any, number: int = 0) -> bytes:
    return msgspec.msgpack.encode([1, OTHER, number, list(items)])


def state(load: dict[str, int], changes: list[Any] | None = None, epoch: int = 1) -> list[Any]:
    return ["s", "other", epoch, load, changes]


LOADS = {f"127.0.{n // 250}.{n % 250}:9": n for n in range(4096)}
MESSAGES: dict[str, Callable[[], bytes]] = {
    "requests for snapshots": lambda: envelope(*[["a"]] * 30_000),
    "too many requests": lambda: envelope(*[["a"]] * 600_000),
    "guesses": lambda: envelope(*[["g", "127.0.0.1:9", [16, b""], b""]] * 9_000),
    "states": lambda: envelope(*[state({})] * 9_000),
    "loads that come and go": lambda: envelope(*[state(LOADS), state({})] * 7),
    "too many states": lambda: envelope(*[state({})] * 120_000),
    "unknown values": lambda: msgspec.msgpack.encode([1, OTHER, 0, [], [[]] * 2_000_000]),
    "depth": lambda: b"\x91" * MAX_RECEIVED_BYTES,
    "too many bytes": lambda: bytes(2 * MAX_RECEIVED_BYTES),
    "as many as Redis holds for a subscriber": lambda: bytes(31 << 20),
}


class Watched:
    """A prober that watches nothing."""

    def watch(self, engine: Engine) -> None: ...

    def forget(self, engine: Engine) -> None: ...


class Routers:
    """A router's part of a group, and what another publishes to it."""

    def __init__(self, server: RedisServer) -> None:
        self.pool = EnginePool()
        self.client = RedisClient(server.url)
        fleet = Fleet(self.pool, Watched())  # type: ignore[arg-type]
        index = PrefixIndex(100_000)
        self.group = Group(
            self.client, "gaps", pool=self.pool, own_fleet=fleet, index=index, tracker=None
        )
        self.redis = Redis.from_url(server.url)

    async def publish(self, message: bytes) -> None:
        await asyncio.to_thread(self.redis.publish, "gaps:routers", message)

    async def until(self, condition: Callable[[], object]) -> None:
        await until(condition, PATIENCE_S)

    async def heard(self) -> None:
        """Return when the router has taken all that was published before, or lost it."""
        refused = self.group.counts["refused_version"]
        await until(
            lambda: self.group.counts["refused_version"] != refused,
            PATIENCE_S,
            meanwhile=lambda: self.publish(msgspec.msgpack.encode([2])),
            look_s=0.05,
        )

    async def close(self) -> None:
        await self.group.close()
        await self.client.close()
        self.redis.close()


@pytest.fixture
async def routers(tmp_path: Any) -> Any:
    if redis_server() is None:
        pytest.skip(MISSING)
    with RedisServer(tmp_path) as server:
        made = Routers(server)
        made.group.start(1)
        await until(lambda: asyncio.to_thread(made.redis.publish, "gaps:routers", b""))
        yield made
        await made.close()


@pytest.mark.parametrize("name", MESSAGES)
async def test_the_worst_message_takes_a_short_turn(routers: Routers, name: str) -> None:
    message = MESSAGES[name]()
    async with GapMeter() as meter:
        for _ in range(2):
            await routers.publish(message)
            await routers.heard()
    assert meter.longest_s < MOST_S


async def test_thousands_of_changes_are_carried_out_a_few_at_a_time_and_bounded(
    routers: Routers,
) -> None:
    async with GapMeter() as meter:
        for first in range(0, MAX_ENGINES + 1000, 1000):
            changes = [
                [f"127.1.{n // 250}.{n % 250}:9", "decode", 1000 + first, OTHER]
                for n in range(first, first + 1000)
            ]
            wanted = min(first + 1000, MAX_ENGINES)
            await routers.publish(envelope(state({}, changes, epoch=first)))
            await routers.until(lambda: len(routers.pool.all()) >= wanted)  # noqa: B023
        await routers.heard()
    assert meter.longest_s < MOST_S
    assert len(routers.pool.all()) == MAX_ENGINES
