"""Nodes as users start them, with a tier below: blocks outlive eviction, and reach other nodes."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.fakes.mooncake import MooncakeStore, free_ports
from tests.fakes.patience import eventually, until
from tests.fakes.redis import RedisCluster, RedisServer
from tests.fakes.store import (
    HASH_BYTES,
    Memory,
    StoreProcess,
    chain_of,
    content_of,
    manifest_of,
    put_chain,
)
from tests.integration.tiers.conftest import TIERS

from kvrouter.engines.engine import CacheGroup
from kvrouter.prefix.stores.node_index import NodeIndex
from kvrouter_store._core import BlockStatus
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.tiers.blocks import HEADER_BYTES

BLOCKS, BLOCK_BYTES = 20, 64 << 10
MANIFEST = manifest_of(BLOCK_BYTES, parts=2)
CHAIN = chain_of(BLOCKS)
KEYS = BLOCKS * 2
Start = Callable[..., StoreProcess]
REMOTE = 2


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts nodes, each over a tier."""
    nodes: list[StoreProcess] = []

    def start(url: str, *flags: str, memory: str = "16MiB") -> StoreProcess:
        folder = tmp_path / f"node-{len(nodes)}"
        folder.mkdir()
        flags = ("--tier", url, "--tier-memory", "4MiB", *flags)
        nodes.append(StoreProcess(folder, memory, *flags).start())
        return nodes[-1]

    yield start
    for node in nodes:
        node.kill()


@pytest.fixture
def redis_url(redis: RedisServer) -> str:
    """The tier of most tests."""
    return redis.url


def put(node: StoreProcess, chain: bytes = CHAIN, token: str = "") -> None:
    with StoreClient(node.url, token=token) as client:
        for part in range(2):
            put_chain(client, MANIFEST, chain, part)


def got(node: StoreProcess, chain: bytes = CHAIN, token: str = "") -> int:
    """How many leading blocks come whole out of the node. A wrong one fails the test."""
    blocks = len(chain) // HASH_BYTES
    memory = Memory(blocks, BLOCK_BYTES)
    span = range(blocks)
    with StoreClient(node.url, token=token, deadline_s=5.0) as client:
        statuses = client.get_into(MANIFEST, 1, chain, span, memory.segments, span)
    for k, status in enumerate(statuses):
        if status is not BlockStatus.OK:
            return k
        block_hash = chain[k * HASH_BYTES : (k + 1) * HASH_BYTES]
        assert memory[k] == content_of(block_hash, BLOCK_BYTES)
    return blocks


def keys_in(redis: RedisServer) -> int:
    return int(redis.command("DBSIZE"))


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest) -> RedisServer | RedisCluster | MooncakeStore:
    """A server of each kind."""
    found: RedisServer | RedisCluster | MooncakeStore = request.getfixturevalue(request.param)
    return found


def test_blocks_of_one_node_are_in_another_over_the_same_tier(
    tier: RedisServer | RedisCluster | MooncakeStore, start: Start
) -> None:
    first, second = start(tier.url), start(tier.url)
    assert eventually(lambda: first.metric("kvstore:tier_up") == 1)
    assert eventually(lambda: second.metric("kvstore:tier_up") == 1)
    put(first)
    assert eventually(lambda: first.metric("kvstore:tier_bytes_total") > KEYS * BLOCK_BYTES)
    with StoreClient(second.url) as client:
        match = client.match(MANIFEST, CHAIN)
    assert match.blocks == BLOCKS
    assert [place.tier for place in match.places] == [REMOTE]
    assert got(second) == BLOCKS
    first.kill()
    assert got(second) == BLOCKS


def test_blocks_that_the_pool_evicted_come_back(redis: RedisServer, start: Start) -> None:
    node = start(redis.url, memory="8MiB")
    put(node)
    assert eventually(lambda: keys_in(redis) == KEYS)
    for seed in "bcdefg":
        put(node, chain_of(BLOCKS, seed))
    assert node.metric('kvstore:evictions_total{reason="capacity"}') > BLOCKS
    assert got(node) == BLOCKS


async def test_what_goes_to_a_tier_is_published_too_and_once_where_the_tier_was_away(
    redis: RedisServer, start: Start
) -> None:
    port, replay_port = free_ports(2)
    config = {
        "enable_kv_cache_events": True,
        "endpoint": f"tcp://127.0.0.1:{port}",
        "replay_endpoint": f"tcp://127.0.0.1:{replay_port}",
    }
    node, meanwhile = start(redis.url, "--kv-events-config", json.dumps(config)), chain_of(5, "new")
    index = NodeIndex(1000, {"": port}, {"": replay_port})

    async def published(chain: bytes, blocks: int) -> None:
        await asyncio.to_thread(put, node, chain)
        group = CacheGroup(MANIFEST.digest.hex())
        await until(lambda: index.match([group], chain) == {node.url: blocks})

    try:
        index.follow([node.url])
        await published(CHAIN, BLOCKS)
        assert await asyncio.to_thread(eventually, lambda: keys_in(redis) == KEYS)
        redis.kill()
        await published(meanwhile, 5)
        messages = index.counts["messages"]
        assert await asyncio.to_thread(eventually, lambda: node.metric("kvstore:tier_up") == 0)
        redis.start()
        assert await asyncio.to_thread(eventually, lambda: keys_in(redis) == KEYS + 10)
        assert index.counts["messages"] == messages
    finally:
        index.close()


@pytest.mark.parametrize("command", ["SETRANGE {} 2000 falsified", "APPEND {} more"])
def test_a_block_falsified_in_redis_is_refused_and_dropped(
    redis: RedisServer, start: Start, command: str
) -> None:
    first, second = start(redis.url), start(redis.url)
    put(first)
    assert eventually(lambda: keys_in(redis) == KEYS)
    first.kill()
    for key in redis.command("KEYS", "*").split():
        redis.command(*command.format(key).split())
    assert got(second) == 0
    assert second.says("not what was stored")
    assert eventually(lambda: keys_in(redis) < KEYS)
    assert second.metric("kvstore:tier_values_total{") >= KEYS


def test_tenants_over_one_redis_find_nothing_of_each_other(
    redis: RedisServer, start: Start, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("a:token-of-tenant-a\nb:token-of-tenant-b\n")
    tokens.chmod(0o600)
    first, second = (start(redis.url, "--token-file", str(tokens)) for _ in range(2))
    put(first, token="token-of-tenant-a")
    assert eventually(lambda: keys_in(redis) == KEYS)
    assert got(second, token="token-of-tenant-b") == 0
    assert got(second, token="token-of-tenant-a") == BLOCKS


def test_a_tier_that_is_away_slows_nothing_down(redis: RedisServer, start: Start) -> None:
    redis.kill()
    node = start(redis.url)
    began = time.monotonic()
    put(node)
    assert got(node) == BLOCKS
    assert got(node, chain_of(BLOCKS, "unknown")) == 0
    assert time.monotonic() - began < 1.0
    assert node.metric("kvstore:tier_up") == 0
    redis.start()
    assert eventually(lambda: node.metric("kvstore:tier_up") == 1)


@pytest.mark.parametrize(("away", "back"), [("kill", "start"), ("stall", "resume")])
def test_what_a_tier_lacks_when_it_is_back_is_written_then(
    redis: RedisServer, start: Start, away: str, back: str
) -> None:
    node = start(redis.url)
    put(node)
    assert eventually(lambda: keys_in(redis) == KEYS)
    getattr(redis, away)()
    put(node, chain_of(BLOCKS, "meanwhile"))
    assert eventually(lambda: node.metric("kvstore:tier_up") == 0)
    getattr(redis, back)()
    assert eventually(lambda: keys_in(redis) == 2 * KEYS)
    written = 2 * KEYS if back == "resume" else 3 * KEYS  # a killed one has lost all
    assert node.metric("kvstore:tier_bytes_total{") == written * (BLOCK_BYTES + HEADER_BYTES)


def test_a_tier_that_stalls_costs_one_request_its_deadline(
    redis: RedisServer, start: Start
) -> None:
    node = start(redis.url, "--tier-timeout", "0.3")
    assert eventually(lambda: node.metric("kvstore:tier_up") == 1)
    redis.stall()
    began = time.monotonic()
    assert got(node, chain_of(BLOCKS, "unknown")) == 0
    assert time.monotonic() - began < 1.0
    assert eventually(lambda: node.metric("kvstore:tier_up") == 0)
    began = time.monotonic()
    assert got(node, chain_of(BLOCKS, "unknown")) == 0
    assert time.monotonic() - began < 0.5
    redis.resume()


def test_a_tier_that_is_not_there_is_in_the_log_and_the_stats_until_it_is_there(
    redis: RedisServer, start: Start
) -> None:
    redis.kill()
    node, name = start(redis.url), redis.url.removesuffix("/0")
    assert node.says(f"{name} is away: ")
    with StoreClient(node.url) as client:
        assert client.stats()[f"tier_up.{name}"] == 0
        redis.start()
        assert node.says(f"{name} is there")
        assert eventually(lambda: client.stats()[f"tier_up.{name}"] == 1)
    assert node.log.count("is away") == 1


def test_a_full_redis_is_in_the_log_with_the_remedy(redis: RedisServer, start: Start) -> None:
    redis.command("CONFIG", "SET", "maxmemory", "1mb")
    node = start(redis.url)
    assert eventually(lambda: node.metric("kvstore:tier_up") == 1)
    put(node)
    assert node.says("maxmemory-policy")
    assert node.metric("kvstore:tier_up") == 1


def test_a_block_that_is_too_large_for_the_memory_of_tiers_says_what_to_set(
    redis: RedisServer, start: Start
) -> None:
    node = start(redis.url, "--tier-memory", "1MiB")
    with StoreClient(node.url) as client:
        put_chain(client, manifest_of(512 << 10), chain_of(1))
    assert node.says("give --tier-memory 3MiB")


def test_a_node_with_a_tier_stops_at_once(redis: RedisServer, start: Start) -> None:
    node = start(redis.url)
    put(node)
    assert eventually(lambda: keys_in(redis) == KEYS)
    began = time.monotonic()
    assert node.stop() == 0
    assert time.monotonic() - began < 3.0


def test_a_second_tier_has_what_the_first_lacks(
    redis: RedisServer, cluster: RedisCluster, start: Start
) -> None:
    behind = start(cluster.url)
    assert eventually(lambda: behind.metric("kvstore:tier_up") == 1)
    put(behind)
    assert eventually(lambda: behind.metric("kvstore:tier_bytes_total") > KEYS * BLOCK_BYTES)
    node = start(f"{redis.url} {cluster.url}")
    assert eventually(lambda: node.metric("kvstore:tier_up") == 2)
    assert got(node) == BLOCKS
    assert eventually(lambda: keys_in(redis) == KEYS)
