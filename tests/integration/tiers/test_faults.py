"""A tier that is killed, stalled or started again costs a deadline, and comes back by itself."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.fakes.mooncake import MooncakeStore
from tests.fakes.patience import until
from tests.fakes.redis import RedisCluster, RedisServer
from tests.integration.tiers.test_contract import values

from kvrouter_store.tiers.base import Memory, TierAway, TierStatus
from kvrouter_store.tiers.guard import Guard
from kvrouter_store.tiers.isolated import Isolated
from kvrouter_store.tiers.registry import open_tier

OK, MISSING, FAILED = TierStatus.OK, TierStatus.MISSING, TierStatus.FAILED
TIMEOUT_S = 1.0
PATIENCE_S = 30.0


@pytest.fixture(params=["redis", pytest.param("mooncake", marks=pytest.mark.mooncake)])
def server(request: pytest.FixtureRequest) -> RedisServer | MooncakeStore:
    """A server that can be killed, stalled and started again."""
    found: RedisServer | MooncakeStore = request.getfixturevalue(request.param)
    return found


@asynccontextmanager
async def guarded(url: str, memory: Memory) -> AsyncIterator[Guard]:
    guard = Guard(open_tier(url), memory, TIMEOUT_S)
    keeping = asyncio.create_task(guard.keep())
    try:
        await until(lambda: guard.up)
        yield guard
    finally:
        keeping.cancel()
        await asyncio.wait({keeping})


async def timed(call: Awaitable[Any]) -> tuple[Any, float]:
    began = time.monotonic()
    return await call, time.monotonic() - began


async def test_a_killed_tier_is_away_and_comes_back_when_it_is_started(
    server: RedisServer | MooncakeStore, memory: Memory
) -> None:
    async with guarded(server.url, memory) as guard:
        items = values(memory, 1000)
        assert await guard.store(items) == [OK] * 3
        server.kill()
        statuses, seconds = await timed(guard.load(items))
        assert OK not in statuses
        assert seconds < 2 * TIMEOUT_S
        await guard.holds([items[0].key])
        await until(lambda: not guard.up)
        server.start()
        await until(lambda: guard.up)
        assert await guard.load(items) == [MISSING] * 3
        assert await guard.store(items) == [OK] * 3


async def test_a_stalled_tier_costs_one_deadline_and_then_nothing(
    server: RedisServer | MooncakeStore, memory: Memory
) -> None:
    async with guarded(server.url, memory) as guard:
        items = values(memory, 1000)
        await guard.store(items)
        server.stall()
        statuses, seconds = await timed(guard.load(items))
        assert statuses == [FAILED] * 3
        assert seconds < 2 * TIMEOUT_S
        assert not guard.up
        statuses, seconds = await timed(guard.load(items))
        assert statuses == [FAILED] * 3
        assert seconds < 0.1
        server.resume()
        await until(lambda: guard.up)
        assert await guard.load(items) == [OK] * 3


async def test_a_tier_that_is_absent_at_the_start_is_used_once_it_is_there(
    redis: RedisServer, memory: Memory
) -> None:
    redis.kill()
    guard = Guard(open_tier(redis.url), memory, TIMEOUT_S)
    keeping = asyncio.create_task(guard.keep())
    assert await guard.holds(["a"]) == [False]
    redis.start()
    await until(lambda: guard.up)
    keeping.cancel()
    await asyncio.wait({keeping})
    assert not guard.up


async def test_a_dead_master_costs_only_its_keys(cluster: RedisCluster, memory: Memory) -> None:
    async with guarded(cluster.url, memory) as guard:
        items = values(memory, 500, 60)
        assert await guard.store(items) == [OK] * 60
        cluster.masters[1].kill()
        for _ in range(2):
            statuses = await guard.load(items)
            assert 20 < statuses.count(OK) < 60
            assert guard.up


async def test_a_stalled_master_costs_only_its_keys(cluster: RedisCluster, memory: Memory) -> None:
    async with guarded(cluster.url, memory) as guard:
        items = values(memory, 500, 60)
        await guard.store(items)
        cluster.masters[2].stall()
        statuses, seconds = await timed(guard.load(items))
        assert 20 < statuses.count(OK) < 60
        assert seconds < TIMEOUT_S
        assert guard.up
        cluster.masters[2].resume()


@pytest.mark.parametrize(("away", "back"), [("kill", "start"), ("stall", "resume")])
async def test_a_cluster_is_used_while_the_master_named_first_is_away(
    cluster: RedisCluster, memory: Memory, away: str, back: str
) -> None:
    first = cluster.masters[0]
    getattr(first, away)()
    async with guarded(cluster.url, memory) as guard:
        items = values(memory, 500, 60)
        assert 20 < (await guard.store(items)).count(OK) < 60
        getattr(first, back)()

        async def are_stored() -> bool:
            return await guard.store(items) == [OK] * 60

        await until(are_stored, look_s=0.05)
        assert guard.up


async def test_a_full_redis_refuses_and_stays_there(redis: RedisServer, memory: Memory) -> None:
    async with guarded(redis.url, memory) as guard:
        items = values(memory, 1 << 20, 4)
        assert await guard.store(items[:1]) == [OK]
        redis.command("CONFIG", "SET", "maxmemory", "1mb")
        assert await guard.store(items[1:]) == [FAILED] * 3
        assert guard.up
        assert await guard.load(items[:1]) == [OK]


async def test_values_expire_after_the_ttl_of_the_url(redis: RedisServer, memory: Memory) -> None:
    tier = open_tier(f"{redis.url}?ttl=1000")
    await tier.start(memory)
    (item,) = values(memory, 100, 1)
    await tier.store([item])
    assert 0 < int(redis.command("TTL", item.key)) <= 1000
    await tier.stop()


@pytest.mark.mooncake
async def test_a_process_that_dies_fails_its_calls_and_is_made_again(
    mooncake: MooncakeStore, memory: Memory
) -> None:
    async with guarded(mooncake.url, memory) as guard:
        tier = Isolated(mooncake.url)
        await tier.start(memory)
        mooncake.stall()
        call = asyncio.create_task(tier.holds(["a"]))
        done, _ = await asyncio.wait({call}, timeout=0.2)
        assert not done
        await tier.stop()
        with pytest.raises(TierAway):
            await call
        mooncake.resume()
        await until(lambda: guard.up)


async def test_a_call_that_hangs_writes_nothing_after_it_was_given_up(
    server: RedisServer | MooncakeStore, memory: Memory
) -> None:
    tier = open_tier(server.url)
    await tier.start(memory)
    items = values(memory, 1 << 20, 2)
    await tier.store(items)
    server.stall()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await tier.load(items)
    memory.view[:] = bytes(len(memory.view))
    server.resume()
    await tier.stop()
    await tier.start(memory)
    assert await tier.holds([items[0].key]) == [True]
    assert not any(memory.view)
    await tier.stop()


async def test_redis_may_close_connections_that_wait(redis: RedisServer, memory: Memory) -> None:
    async with guarded(redis.url, memory) as guard:
        items = values(memory, 1000)
        assert await guard.store(items) == [OK] * 3
        redis.command("CLIENT", "KILL", "TYPE", "normal")
        assert await guard.load(items) == [OK] * 3
        assert guard.up
