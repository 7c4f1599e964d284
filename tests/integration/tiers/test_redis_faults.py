"""What a Redis refuses, and masters of a cluster that are away, cost what they must and no more."""

import asyncio
import logging
import re
import shlex
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis.asyncio.cluster
from tests.fakes.certificates import Authority
from tests.fakes.patience import until
from tests.fakes.redis import MISSING, RedisCluster, RedisServer, redis_server
from tests.integration.tiers.test_contract import blank, bytes_of, values
from tests.integration.tiers.test_faults import guarded

from kvrouter_store.tiers import redis as redis_tier
from kvrouter_store.tiers.base import Memory, Tier, TierAway, TierStatus
from kvrouter_store.tiers.redis import PROBES
from kvrouter_store.tiers.registry import open_tier

PAGE = Path(__file__).resolve().parents[3] / "docs/tiers.md"
OK, FAILED = TierStatus.OK, TierStatus.FAILED


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


async def test_calls_for_keys_of_a_dead_master_alone_leave_the_others_there(
    cluster: RedisCluster, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    async with guarded(cluster.url, memory) as guard:
        items = values(memory, 500, 60)
        assert await guard.store(items) == [OK] * 60
        cluster.masters[1].kill()
        statuses = []
        for item in items:
            statuses += await guard.load([item])
            assert guard.up
        assert 20 < statuses.count(OK) < 60
    lost = f"goes on without 127.0.0.1:{cluster.masters[1].port} and its keys"
    assert caplog.text.count(lost) == 1


async def test_a_cluster_is_away_once_none_of_its_masters_answers(
    cluster: RedisCluster, memory: Memory
) -> None:
    async with guarded(cluster.url, memory) as guard:
        items = values(memory, 500, 60)
        for master in cluster.masters:
            master.kill()
        for item in items:
            await guard.load([item])
        assert not guard.up


async def test_keys_that_no_master_has_leave_the_others_there(
    cluster: RedisCluster, memory: Memory
) -> None:
    items = values(memory, 500, 30)
    for key in (PROBES[0], items[0].key):
        await leave(cluster, key)
    async with guarded(cluster.url, memory) as guard:
        statuses = await guard.store(items)
        assert statuses[0] is FAILED
        assert OK in statuses
        assert await guard.load(items) == statuses
        held = await guard.holds([item.key for item in items])
        assert held == [status is OK for status in statuses]
        assert await guard.load(items[:1]) == [FAILED]
        assert guard.up


async def leave(cluster: RedisCluster, key: str) -> None:
    """Have no master of the cluster serve a key."""
    slot = cluster.masters[0].command("CLUSTER", "KEYSLOT", key)

    async def is_left() -> bool:  # a master that has not heard of it may say the opposite
        return not await asyncio.to_thread(served, cluster, slot)

    await until(is_left)


def served(cluster: RedisCluster, slot: str) -> bool:
    """Whether a master had the slot, until now."""
    said = [master.command("CLUSTER", "DELSLOTS", slot) for master in cluster.masters]
    return any("OK" in each for each in said)


async def test_the_map_of_a_cluster_is_read_once_at_a_time_and_not_after_the_end(
    cluster: RedisCluster, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, ended = [], []

    async def initialize(self: object) -> None:
        began.append(self)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(self)

    items = values(memory, 500, 60)
    async with started(cluster.url, memory) as tier:
        monkeypatch.setattr(redis.asyncio.cluster.NodesManager, "initialize", initialize)
        monkeypatch.setattr(redis_tier, "MAP_PAUSE_S", 0.0)
        cluster.masters[1].kill()
        cluster.masters[2].stall()
        for _ in range(3):
            await tier.load(items)
        assert len(began) == 1
        load = asyncio.create_task(tier.load(items))
        await asyncio.sleep(0)
        await tier.stop()
        assert len(ended) == 1
        with pytest.raises(TierAway):
            await load
        assert len(began) == 1


async def test_a_server_of_a_cluster_as_a_single_redis_is_away_for_that(
    cluster: RedisCluster, memory: Memory
) -> None:
    await assert_away(cluster.masters[0].url, memory, r"write redis\+cluster://")


async def test_a_replica_is_away_for_that(redis: RedisServer, memory: Memory) -> None:
    redis.command("REPLICAOF", "127.0.0.1", "1")
    await assert_away(redis.url, memory, "READONLY")


async def test_a_user_without_rights_to_the_keys_is_told_so(
    redis: RedisServer, memory: Memory
) -> None:
    redis.command("ACL", "SETUSER", "node", "on", ">word", "~other:*", "+@all")
    await assert_away(redis.url.replace("//", "//node:word@"), memory, "NOPERM")
    redis.command("ACL", "SETUSER", "node", "~kvrouter:1:*")
    async with guarded(redis.url.replace("//", "//node:word@"), memory) as guard:
        assert await guard.holds(["kvrouter:1:a"]) == [False]


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster"])
async def test_the_rights_that_the_documentation_names_are_enough(
    scheme: str, redis: RedisServer, cluster: RedisCluster, memory: Memory
) -> None:
    single, more = re.findall(r"redis-cli (ACL SETUSER .*)", PAGE.read_text())
    servers, url = [redis], redis.url
    rights = [single]
    if scheme == "redis+cluster":
        servers, url, rights = cluster.masters, cluster.url, [single, more]
    for server in servers:
        for each in rights:
            assert server.command(*shlex.split(each)) == "OK"
    async with guarded(url.replace("//", "//node:PASSWORD@"), memory) as guard:
        found = values(memory, 500, 20)
        items = [item._replace(key=f"kvrouter:1:{item.key}") for item in found]
        assert await guard.store(items) == [OK] * 20
        assert await guard.load(items) == [OK] * 20
        await guard.drop_falsified([items[0].key])
        assert await guard.holds([item.key for item in items]) == [False] + [True] * 19


async def assert_away(url: str, memory: Memory, why: str) -> None:
    with pytest.raises(TierAway, match=why):
        async with started(url, memory):
            pass


async def test_a_redis_that_is_full_at_the_start_gives_what_it_has(
    redis: RedisServer, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    items = values(memory, 1 << 20, 2)
    async with guarded(redis.url, memory) as guard:
        assert await guard.store(items[:1]) == [OK]
    redis.command("CONFIG", "SET", "maxmemory", "1mb")
    async with guarded(redis.url, memory) as guard:
        assert await guard.store(items[1:]) == [FAILED]
        assert await guard.load(items[:1]) == [OK]
    assert len(re.findall("refuses values: OOM", caplog.text)) == 1


async def test_probes_leave_nothing_behind(redis: RedisServer, memory: Memory) -> None:
    async with guarded(redis.url, memory):
        assert redis.command("DBSIZE") == "0"


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
