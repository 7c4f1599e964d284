"""What goes wrong with a Redis costs what it must, and no more."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.fakes.certificates import Authority
from tests.fakes.redis import MISSING, RedisServer, redis_server
from tests.integration.tiers.test_contract import blank, bytes_of, values

from kvrouter_store.tiers.base import Memory, Tier, TierAway, TierStatus
from kvrouter_store.tiers.registry import open_tier

OK = TierStatus.OK


@pytest.fixture
def tls_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A redis-server that speaks TLS alone."""
    if redis_server() is None:
        pytest.skip(MISSING)
    with RedisServer(tmp_path, authority=Authority(tmp_path)) as server:
        yield server


@asynccontextmanager
async def started(url: str, memory: Memory) -> AsyncIterator[Tier]:
    tier = open_tier(url)
    try:
        await tier.start(memory)
        yield tier
    finally:
        await tier.stop()


async def test_a_redis_that_stalls_over_tls_has_the_same_time_to_answer(
    tls_redis: RedisServer, memory: Memory
) -> None:
    items = values(memory, 1 << 20)
    before = bytes_of(memory, items)
    async with started(tls_redis.url, memory) as tier:
        assert await tier.store(items) == [OK] * 3
        blank(memory)
        assert await tier.load(items) == [OK] * 3
        assert bytes_of(memory, items) == before
        tls_redis.stall()
        with pytest.raises(TierAway):
            async with asyncio.timeout(5.0):
                await tier.load(items)
