"""Entries in Redis: what is kept when they vanish, what others write; `kvrouter register`."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.fakes.certificates import Authority
from tests.fakes.engine import FakeEngine, engines
from tests.fakes.patience import until
from tests.fakes.redis import MISSING, RedisServer, redis_server
from tests.integration.discovery.conftest import Heard, followed

from kvrouter.credentials.tls import server_context
from kvrouter.engines.engine import Role
from kvrouter.membership.discovery import make_source
from kvrouter.membership.discovery.base import SourceContext
from kvrouter.membership.discovery.redis import EngineEntry, EntryGrace
from kvrouter.redis.client import RedisClient, RedisFailed
from kvrouter.tools.demo.children import Child, Children

A, B = "10.0.0.1:8000", "10.0.0.2:8000"


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    if redis_server() is None:
        pytest.skip(MISSING)
    with RedisServer(tmp_path) as server:
        yield server


@pytest_asyncio.fixture
async def link(redis: RedisServer) -> AsyncIterator[RedisClient]:
    made = RedisClient(redis.url)
    yield made
    await made.close()


def up(role: str = "decode", ttl_s: float = 10.0) -> EngineEntry:
    return EngineEntry(Role(role), "up", ttl_s)


def test_an_entry_that_vanishes_is_kept_for_its_time_while_redis_can_be_read() -> None:
    kept = EntryGrace()
    assert kept.read(0.0, {A: up(), B: up()}) == {A: Role.DECODE, B: Role.DECODE}
    for second in range(1, 10):
        assert kept.read(float(second), {B: up()}) == {A: Role.DECODE, B: Role.DECODE}
    assert kept.read(10.0, {B: up()}) == {B: Role.DECODE}


def test_no_time_passes_for_entries_while_redis_is_away() -> None:
    kept = EntryGrace()
    kept.read(0.0, {A: up()})
    kept.unreachable()
    assert kept.read(1000.0, {}) == {A: Role.DECODE}  # it is back, and empty
    for second in range(1, 10):
        assert kept.read(1000.0 + second, {}) == {A: Role.DECODE}
    assert kept.read(1010.0, {}) == {}


def test_an_entry_that_is_written_again_has_its_full_time() -> None:
    kept = EntryGrace()
    kept.read(0.0, {A: up()})
    for second in range(1, 9):
        kept.read(float(second), {})
    kept.read(9.0, {A: up()})
    for second in range(10, 19):
        assert kept.read(float(second), {}) == {A: Role.DECODE}
    assert kept.read(19.0, {}) == {}


def test_a_router_that_stood_still_for_long_forgets_no_engine() -> None:
    kept = EntryGrace()
    kept.read(0.0, {A: up()})
    assert kept.read(3600.0, {}) == {A: Role.DECODE}


def test_a_goodbye_holds_at_once_and_until_the_entry_is_up_again() -> None:
    kept = EntryGrace()
    kept.read(0.0, {A: up("prefill")})
    assert kept.read(1.0, {A: EngineEntry(Role.PREFILL, "leaving")}) == {}
    assert kept.read(2.0, {}) == {}
    assert kept.read(3.0, {A: up("both")}) == {A: Role.BOTH}


async def put(link: RedisClient, address: str, value: str, prefix: str = "kvrouter") -> None:
    await link.call("SADD", f"{prefix}:engines", address)
    await link.call("SET", f"{prefix}:engine:{address}", value, "PX", 60_000)
    await link.call("PUBLISH", f"{prefix}:engines:news", "")


async def test_other_programs_may_write_entries(link: RedisClient) -> None:
    async with followed(make_source("redis", SourceContext(link))) as heard:
        await put(link, A, '{"role": "prefill"}')
        await put(link, f"http://{B}", '{"role": "both", "weight": 3}')
        await heard.names({A: Role.PREFILL, B: Role.BOTH})
        await put(link, "rack1-a=c:1", '{"role": "decode"}')
        await heard.names({A: Role.PREFILL, B: Role.BOTH, "rack1-a=c:1": Role.DECODE})


async def test_routers_of_another_prefix_see_others(link: RedisClient) -> None:
    await put(link, A, '{"role": "decode"}')
    await put(link, B, '{"role": "decode"}', "other")
    async with followed(make_source("redis", SourceContext(link, "other"))) as heard:
        await heard.names({B: Role.DECODE})


async def test_an_entry_that_cannot_be_read_is_left_out_and_logged_once(
    link: RedisClient, caplog: pytest.LogCaptureFixture
) -> None:
    await put(link, A, '{"role": "decode"}')
    for name, value in ((B, "not JSON"), ("c:1", '{"role": "regular"}'), ("no port", "{}")):
        await put(link, name, value)
    async with followed(make_source("redis", SourceContext(link))) as heard:
        await heard.names({A: Role.DECODE})
        await put(link, "d:1", '{"role": "decode"}')
        await heard.names({A: Role.DECODE, "d:1": Role.DECODE})
    told = [str(record.args) for record in caplog.records if "left out" in record.msg]
    assert len(told) == 3
    assert all(any(f"'{name}'" in each for each in told) for name in (B, "c:1", "no port"))


async def test_addresses_whose_entry_has_gone_are_taken_out_of_the_set(link: RedisClient) -> None:
    await link.call("SADD", "kvrouter:engines", A)
    await put(link, B, '{"role": "decode"}')
    async with followed(make_source("redis", SourceContext(link))) as heard:
        await heard.names({B: Role.DECODE})
        await members(link, B)


async def members(link: RedisClient, *addresses: str) -> None:
    """Return when the set holds exactly these."""

    async def are_named() -> bool:
        return {m.decode() for m in await link.call("SMEMBERS", "kvrouter:engines")} == {*addresses}

    await until(are_named)


async def test_an_entry_that_is_not_renewed_goes_after_its_time(link: RedisClient) -> None:
    async with followed(make_source("redis", SourceContext(link))) as heard:
        await put(link, A, '{"role": "decode", "ttl_s": 0.5}')
        await heard.names({A: Role.DECODE})
        await link.call("DEL", f"kvrouter:engine:{A}")
        await heard.names({})


async def test_an_unreachable_redis_is_reported_in_the_same_words(tmp_path: Path) -> None:
    link = RedisClient("redis://127.0.0.1:1/0")
    async with followed(make_source("redis", SourceContext(link))) as heard:
        said = {await heard.complains()}
        words = heard.words
        await heard.until(lambda: heard.words > words + 3)
        assert heard.problem is not None
        assert {*said, heard.problem} == said
        assert "127.0.0.1:1" in heard.problem
    await link.close()


class Sidecar:
    """`kvrouter register` for one engine, as a process."""

    def __init__(self, children: Children, redis: RedisServer, engine: FakeEngine) -> None:
        self._children = children
        self._arguments = ["--redis", redis.url, "--decode", engine.address, "--ttl", "2"]
        self.child: Child | None = None

    async def start(self, *more: str) -> Child:
        """Returns when the engine is registered."""
        arguments = [*self._arguments, *more]
        self.child = await self._children.start("register", "register", *arguments)
        return self.child


@pytest_asyncio.fixture
async def sidecar(
    redis: RedisServer, tmp_path: Path
) -> AsyncIterator[Callable[[FakeEngine], Sidecar]]:
    async with Children(tmp_path) as children:
        yield lambda engine: Sidecar(children, redis, engine)


async def entry(link: RedisClient, engine: FakeEngine) -> Any:
    """What stands in Redis; None where nothing does, or Redis is away."""
    try:
        value = await link.call("GET", f"kvrouter:engine:{engine.address}")
    except RedisFailed:
        return None
    return json.loads(value) if value is not None else None


async def test_register_keeps_an_engine_and_says_goodbye(
    link: RedisClient, sidecar: Callable[[FakeEngine], Sidecar]
) -> None:
    async with engines(1) as (engine,):
        child = await sidecar(engine).start()
        await says_goodbye(link, engine, child)


async def says_goodbye(link: RedisClient, engine: FakeEngine, child: Child) -> None:
    async with followed(make_source("redis", SourceContext(link))) as heard:
        await heard.names({engine.address: Role.DECODE})
        ttl_ms = await link.call("PTTL", f"kvrouter:engine:{engine.address}")
        assert 0 < ttl_ms <= 2000
        child.process.terminate()
        assert await child.process.wait() == 0
        await heard.names({})
        left = await entry(link, engine)
        assert left in (None, {"role": "decode", "state": "leaving", "ttl_s": 2.0})


async def test_register_renews_only_while_the_engine_is_healthy(
    link: RedisClient, sidecar: Callable[[FakeEngine], Sidecar]
) -> None:
    async with engines(1) as (engine,):
        await sidecar(engine).start()
        await engine.stop()

        async def gone() -> bool:
            return await entry(link, engine) is None

        await until(gone)
        await engine.start()

        async def there() -> bool:
            return bool(await entry(link, engine))

        await until(there)


async def test_register_puts_an_engine_in_again_when_redis_has_lost_all(
    redis: RedisServer, link: RedisClient, sidecar: Callable[[FakeEngine], Sidecar]
) -> None:
    async with engines(1) as (engine,):
        await sidecar(engine).start()
        await survives(redis, link, engine)


async def survives(redis: RedisServer, link: RedisClient, engine: FakeEngine) -> None:
    async with followed(make_source("redis", SourceContext(link))) as heard:
        await heard.names({engine.address: Role.DECODE})
        said: list[object] = []
        note(heard, said)
        redis.kill()
        await heard.complains()
        redis.start()
        await heard.names({engine.address: Role.DECODE})

        async def there() -> bool:
            return bool(await entry(link, engine))

        await until(there)
        assert {} not in said


def note(heard: Heard, said: list[object]) -> None:
    real = heard.named

    def named(members: Any, *, restore: bool = False) -> None:
        said.append(members)
        real(members, restore=restore)

    heard.named = named  # type: ignore[method-assign]


async def test_register_reaches_engines_behind_https_that_ask_for_a_certificate(
    link: RedisClient, sidecar: Callable[[FakeEngine], Sidecar], tmp_path: Path
) -> None:
    authority, engine = Authority(tmp_path), FakeEngine()
    engine.tls = server_context(*authority.sign(), authority.ca_file)
    cert, key = authority.sign("register")
    await engine.start()
    url = f"https://{engine.address}"
    try:
        # The plain address, which the fixture gives too, never answers: it is behind TLS.
        files = "--engine-ca-file", authority.ca_file, "--engine-cert-file", cert
        await sidecar(engine).start("--decode", url, *files, "--engine-key-file", key)
        async with followed(make_source("redis", SourceContext(link))) as heard:
            await heard.names({url: Role.DECODE})
    finally:
        await engine.stop()


async def test_register_keeps_a_store_node_while_it_takes_connections(
    link: RedisClient, sidecar: Callable[[FakeEngine], Sidecar]
) -> None:
    async with engines(1) as (engine,):
        node = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        url = f"kv://127.0.0.1:{node.sockets[0].getsockname()[1]}"
        await sidecar(engine).start("--store", url)
        async with followed(make_source("redis", SourceContext(link))) as heard:
            await heard.names({engine.address: Role.DECODE, url: Role.STORE})
            node.close()
            await node.wait_closed()
            await heard.names({engine.address: Role.DECODE})


async def test_register_that_is_killed_leaves_its_entry_to_expire(
    link: RedisClient, sidecar: Callable[[FakeEngine], Sidecar]
) -> None:
    async with engines(1) as (engine,):
        child = await sidecar(engine).start()
        async with followed(make_source("redis", SourceContext(link))) as heard:
            await heard.names({engine.address: Role.DECODE})
            os.kill(child.pid, signal.SIGKILL)
            await heard.names({})


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--decode", "a:1"), "no Redis to register in: give --redis redis://HOST:PORT/DB"),
        (
            ("--redis", "redis://a"),
            "nothing to register: give --decode URL",
        ),
        (("--redis", "http://a", "--decode", "a:1"), "give it as redis://"),
        (("--redis", "redis://a", "--decode", "a"), "engine 'a': give it as"),
    ],
)
def test_wrong_use_of_register_is_one_sentence(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], complaint: str
) -> None:
    from kvrouter.cli.main import main

    assert main(["register", *flags]) == 2
    assert complaint in capsys.readouterr().err


def test_an_engine_of_both_roles_registers_once() -> None:
    from kvrouter.membership.discovery.register import RegisterSettings

    given: dict[str, Any] = {"redis": "redis://a", "prefill": [A], "decode": ["http://" + A, B]}
    settings = RegisterSettings(**given, health_timeout_s=1.0, log_level="error")
    assert settings.members == {A: Role.BOTH, B: Role.DECODE}
    given["decode"][0] = f"rack1-a={A}"
    settings = RegisterSettings(**given, health_timeout_s=1.0, log_level="error")
    assert settings.members == {f"rack1-a={A}": Role.BOTH, B: Role.DECODE}
