"""Routers over one Redis: load, engines and guesses are shared; Redis may go and come."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest_asyncio
from tests.fakes.engine import FakeEngine, engines
from tests.fakes.patience import until
from tests.fakes.redis import RedisServer

from kvrouter.app.build import App, build
from kvrouter.app.settings import RouterSettings
from kvrouter.engines.engine import Role
from kvrouter.http.server.exchange import Exchange
from kvrouter.redis.client import RedisClient

PATIENCE_S = 20.0
JSON = {"content-type": "application/json"}
PROMPT = list(range(100, 164))


class Replica:
    """One router and a client of it."""

    def __init__(self, app: App, port: int, http: aiohttp.ClientSession) -> None:
        self.app = app
        self.url = f"http://127.0.0.1:{port}"
        self.http = http

    async def complete(self, prompt: Any = "Hello", **more: Any) -> int:
        body = {"model": "m", "prompt": prompt, "max_tokens": 4, **more}
        async with self.http.post(f"{self.url}/v1/completions", json=body) as answer:
            await answer.read()
            return answer.status

    async def worker(self, method: str, engine: FakeEngine, kind: str = "") -> int:
        url = f"{self.url}/workers"
        if method == "POST":
            body = {"url": engine.address, "worker_type": kind}
            async with self.http.post(url, json=body) as answer:
                return answer.status
        async with self.http.request(method, f"{url}/{engine.address}") as answer:
            return answer.status

    async def metric(self, line: str) -> float:
        async with self.http.get(f"{self.url}/metrics") as answer:
            page = await answer.text()
        rows = [row for row in page.splitlines() if row.startswith(line)]
        return float(rows[0].rsplit(" ", 1)[1]) if rows else 0.0

    def tokens(self, engine: FakeEngine) -> int:
        found = self.app.core.pool.find(engine.address)
        return found.tokens if found is not None else -1


Open = Callable[..., Awaitable[Replica]]


@pytest_asyncio.fixture
async def replica(redis: RedisServer) -> AsyncIterator[Open]:
    """Opens routers of one group."""
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession())

        async def open_replica(
            prefill: list[FakeEngine], decode: list[FakeEngine], **more: Any
        ) -> Replica:
            settings: dict[str, Any] = {
                "redis": redis.url,
                "health_interval_s": 0.05,
                "engine_wait_s": 0.0,
                "policy": "least_tokens",
                "admin": True,
                "index_blocks": 2048,
                "port": 0,
                **more,
            }
            app = build(
                RouterSettings(
                    prefill=[e.address for e in prefill],
                    decode=[e.address for e in decode],
                    **settings,
                )
            )
            port = await app.start()
            stack.push_async_callback(app.close)
            return Replica(app, port, http)

        yield open_replica


def others(replica: Replica) -> int:
    assert replica.app.members.group is not None
    return len(replica.app.members.group.peers)


async def met(*replicas: Replica) -> None:
    """Returns when each hears all others."""
    await until(lambda: all(others(each) == len(replicas) - 1 for each in replicas))


async def test_routers_of_one_group_find_each_other_and_part(replica: Open) -> None:
    async with engines(2) as (p, d):
        one, two = await replica([p], [d]), await replica([p], [d])
        stranger = await replica([p], [d], redis_prefix="elsewhere")
        await met(one, two)
        assert others(stranger) == 0
        assert await one.metric("kvrouter:replicas ") == 1
        await two.app.close()
        await until(lambda: others(one) == 0)


async def test_what_another_router_has_under_way_counts_until_it_ends(replica: Open) -> None:
    async with engines(3) as (p, d, e):
        one, two = await replica([p], [d, e]), await replica([p], [d, e])
        await met(one, two)
        for engine in (d, e):
            engine.mode = "held"
        task = asyncio.create_task(one.complete(PROMPT))
        await until(lambda: len(d.requests) + len(e.requests) == 1)
        busy, idle = (d, e) if d.requests else (e, d)
        await until(lambda: two.tokens(busy) >= len(PROMPT))
        assert two.tokens(idle) == 0
        for _ in range(4):  # whoever's turn it is: the engine where nothing is under way takes it
            idle.mode = "ok"
            assert await two.complete(PROMPT) == 200
        assert len(busy.requests) == 1
        d.go.set()
        e.go.set()
        assert await task == 200
        await until(lambda: two.tokens(busy) == 0)


async def test_the_admin_shows_its_own_load_alone(replica: Open) -> None:
    async with engines(2) as (p, d):
        one, two = await replica([p], [d]), await replica([p], [d])
        await met(one, two)
        d.mode = "held"
        task = asyncio.create_task(one.complete(PROMPT))
        await until(lambda: two.tokens(d) >= len(PROMPT))
        async with two.http.get(f"{two.url}/workers/{d.address}") as answer:
            card = await answer.json()
        assert (card["load"], card["tokens"]) == (0, 0)
        d.go.set()
        await task


async def test_the_load_of_a_router_that_is_gone_fades(replica: Open) -> None:
    async with engines(2) as (p, d):
        one, two = await replica([p], [d]), await replica([p], [d])
        await met(one, two)
        d.mode = "held"
        task = asyncio.create_task(one.complete(PROMPT))
        await until(lambda: two.tokens(d) >= len(PROMPT))
        assert one.app.members.group is not None
        await one.app.members.group.close()  # it says nothing any more, as if it were killed
        await until(lambda: two.tokens(d) == 0)
        await until(lambda: others(two) == 0)
        d.go.set()
        assert await task == 200


async def test_engines_that_are_added_and_drained_at_one_are_so_at_all(replica: Open) -> None:
    async with engines(3) as (p, d, e):
        one, two = await replica([p], [d]), await replica([p], [d])
        await met(one, two)
        assert await one.worker("POST", e, "decode") == 202
        await until(lambda: len(two.app.core.pool.engines(Role.DECODE)) == 2)
        assert await two.worker("DELETE", d) in (200, 202)
        await until(lambda: one.app.core.pool.find(d.address) is None)
        for each in (one, two):
            assert await each.complete() == 200
        assert (len(d.requests), len(e.requests)) == (0, 2)


async def test_who_joins_later_follows_what_was_said_before(replica: Open) -> None:
    async with engines(4) as (p, d, e, f):
        one = await replica([p], [d, e])
        await one.worker("POST", f, "decode")
        await one.worker("DELETE", e)
        late = await replica([p], [d, e])
        await until(lambda: late.app.core.pool.find(e.address) is None)
        await until(lambda: len(late.app.core.pool.engines(Role.DECODE)) == 2)
        assert late.app.core.pool.find(f.address) is not None


async def test_an_engine_that_is_drained_can_come_back_everywhere(replica: Open) -> None:
    async with engines(3) as (p, d, e):
        one, two = await replica([p], [d, e]), await replica([p], [d, e])
        await met(one, two)
        await one.worker("DELETE", e)
        await until(lambda: two.app.core.pool.find(e.address) is None)
        await two.worker("POST", e, "decode")
        await until(lambda: len(one.app.core.pool.engines(Role.DECODE)) == 2)


def name_blocks(*engines: FakeEngine) -> None:
    """Have the engines' metrics tell how long their blocks are, so that prompts are hashed."""

    async def page(exchange: Exchange) -> None:
        exchange.respond(200, b'vllm:cache_config_info{block_size="16"} 1.0\n')

    for engine in engines:
        engine.pages["/metrics"] = page


def guessed(replica: Replica, engine: FakeEngine) -> int:
    """Blocks that the router believes the engine to hold."""
    target, end = replica.app.core.pool.find(engine.address), None
    found: set[int] = set()
    while target is not None and end != 0:
        end, ids = replica.app.core.index.held(target, end)
        found |= set(array("Q", ids))
    return len(found)


async def test_a_prefix_that_one_sent_somewhere_is_used_by_the_other(replica: Open) -> None:
    async with engines(2) as (d, e):
        name_blocks(d, e)
        one = await replica([], [d, e], policy="prefix")
        two = await replica([], [d, e], policy="prefix")
        await met(one, two)
        assert await one.complete(PROMPT) == 200
        first, other = (d, e) if d.requests else (e, d)
        await until(lambda: guessed(two, first) > 0)
        for _ in range(4):
            assert await two.complete(PROMPT) == 200
        assert (len(first.requests), len(other.requests)) == (5, 0)


async def test_who_joins_later_is_told_what_was_guessed_before(replica: Open) -> None:
    async with engines(2) as (d, e):
        name_blocks(d, e)
        one = await replica([], [d, e], policy="prefix")
        assert await one.complete(PROMPT) == 200
        first = d if d.requests else e
        late = await replica([], [d, e], policy="prefix")
        await until(lambda: guessed(late, first) == guessed(one, first) > 0)


async def test_redis_killed_and_back_costs_no_request(replica: Open, redis: RedisServer) -> None:
    async with engines(3) as (p, d, e):
        one, two = await replica([p], [d, e]), await replica([p], [d, e])
        await met(one, two)
        redis.kill()
        for each in (one, two):
            assert [await each.complete() for _ in range(5)] == [200] * 5
        await until(lambda: others(one) == others(two) == 0)
        await one.worker("DELETE", e)
        redis.start()
        await met(one, two)
        await until(lambda: two.app.core.pool.find(e.address) is None)
        assert [await each.complete() for each in (one, two)] == [200, 200]


async def test_a_stalled_redis_costs_no_request(replica: Open, redis: RedisServer) -> None:
    async with engines(3) as (p, d, e):
        one, two = await replica([p], [d, e]), await replica([p], [d, e])
        await met(one, two)
        redis.stall()
        async with asyncio.timeout(PATIENCE_S):
            for each in (one, two):
                assert [await each.complete() for _ in range(5)] == [200] * 5
        await until(lambda: others(one) == others(two) == 0)
        redis.resume()
        await met(one, two)


async def test_a_router_starts_without_its_redis(replica: Open, redis: RedisServer) -> None:
    redis.kill()
    async with engines(2) as (p, d):
        one = await replica([p], [d])
        assert await one.complete() == 200
        redis.start()
        two = await replica([p], [d])
        await met(one, two)


async def test_what_is_no_message_of_a_router_is_counted_and_ignored(
    replica: Open, redis: RedisServer
) -> None:
    async with engines(2) as (p, d):
        one, two = await replica([p], [d]), await replica([p], [d])
        await met(one, two)
        vandal = RedisClient(redis.url)
        for junk in (b"", b"\xc1", b"\x94\x01\xa1x\x01\x90", b"\x94\x02\x01\x01\x01", b"x" * 9000):
            await vandal.call("PUBLISH", "kvrouter:routers", junk)
        await vandal.close()
        await until(lambda: one.app.members.group.counts["refused_malformed"] == 4)  # type: ignore[union-attr]
        assert one.app.members.group is not None
        assert one.app.members.group.counts["refused_version"] == 1
        assert await one.complete() == 200
        assert others(one) == 1


async def test_a_router_registers_and_its_key_goes_with_it(
    replica: Open, redis: RedisServer
) -> None:
    async with engines(2) as (p, d):
        one = await replica([p], [d])
        assert one.app.members.group is not None
        link = RedisClient(redis.url)
        key = f"kvrouter:router:{one.app.members.group.id}"
        name = one.app.members.group.name.encode()

        async def is_written() -> bool:
            return bool(await link.call("GET", key) == name)

        await until(is_written)
        assert 0 < await link.call("PTTL", key) <= 5000
        await one.app.close()
        assert await link.call("GET", key) is None
        await link.close()
