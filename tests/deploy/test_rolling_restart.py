"""Routers behind a real NGINX, Envoy or HAProxy, and their store, are restarted under traffic."""

import asyncio
import json
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.fakes.envoy import MISSING as NO_ENVOY
from tests.fakes.envoy import envoy, envoy_program, until_envoy_sees_all
from tests.fakes.haproxy import MISSING as NO_HAPROXY
from tests.fakes.haproxy import haproxy, haproxy_program, until_haproxy_sees_all
from tests.fakes.nginx import MISSING as NO_NGINX
from tests.fakes.nginx import nginx, nginx_program

from kvrouter.tools.demo.children import Child, Children, free_port

DRAIN = ("--drain-delay", "0.5", "--drain-timeout", "2")
TOKEN_S = 0.1
SHORT_TOKENS = 3
LONG_TOKENS = 50
"""5 s: longer than the drain."""
BLOCK_TOKENS = 16
PROMPT_WORDS = 64
"""Some blocks, of other tokens for each request."""
WORKERS = 4
"""Clients of each kind that ask one request after the other."""
Json = dict[str, Any]


@dataclass
class Seen:
    """What one client got.

    Attributes:
        status: HTTP status; 0: the connection broke before there was one.
        tokens: that have come, of a stream.
        error: the error event that ended it.
        done: whether its answer came to its proper end.
    """

    stream: bool
    status: int = 0
    tokens: int = 0
    error: Json | None = None
    done: bool = False

    @property
    def begun(self) -> bool:
        return self.status == 200


@dataclass
class Traffic:
    """Clients that go on until `over`; what became of all their requests."""

    url: str
    http: aiohttp.ClientSession
    over: asyncio.Event = field(default_factory=asyncio.Event)
    seen: list[Seen] = field(default_factory=list)
    under_way: set[asyncio.Task[None]] = field(default_factory=set)

    async def client(self, *, stream: bool, tokens: int) -> None:
        while not self.over.is_set():
            task = asyncio.create_task(self._ask(stream=stream, tokens=tokens))
            self.under_way.add(task)
            await task
            self.under_way.discard(task)

    async def settled(self) -> None:
        """Return when all that is under way now has ended, also what another router took over."""
        await asyncio.gather(*self.under_way)

    async def _ask(self, *, stream: bool, tokens: int) -> None:
        seen = Seen(stream)
        self.seen.append(seen)
        prompt = f"{len(self.seen)} " * PROMPT_WORDS
        body = {"model": "sim", "prompt": prompt, "max_tokens": tokens, "stream": stream}
        try:
            async with self.http.post(f"{self.url}/v1/completions", json=body) as answer:
                seen.status = answer.status
                if answer.status != 200:
                    return
                if not stream:
                    told = await answer.json()
                    seen.done = told["usage"]["completion_tokens"] == tokens
                    return
                async for line in answer.content:
                    _take(seen, line.strip().removeprefix(b"data: "))
        except aiohttp.ClientError:
            return


def _take(seen: Seen, data: bytes) -> None:
    if data == b"[DONE]":
        seen.done = True
    elif data and "error" in (event := json.loads(data)):
        seen.error = event["error"]
    elif data:
        seen.tokens += len(event["choices"])


class Server:
    """A process that can be restarted on its ports, as operators restart it."""

    def __init__(self, children: Children, name: str, *arguments: str) -> None:
        self._children = children
        self._name = name
        self._arguments = arguments
        self.lives: list[Child] = []

    async def start(self) -> None:
        name = f"{self._name}-{len(self.lives)}"
        self.lives.append(await self._children.start(name, *self._arguments))

    async def restart(self) -> None:
        """End it by SIGTERM, and start it again; returns when it is ready."""
        process = self.lives[-1].process
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
        await self.start()

    def cut_off(self) -> list[Json]:
        """The lines of requests that it cut off, as a router."""
        logs = (self._children.logged(life).splitlines() for life in self.lives)
        lines = [json.loads(line) for log in logs for line in log if line.startswith("{")]
        return [line for line in lines if line.get("outcome") == "cut_off"]


@dataclass(frozen=True)
class Fleet:
    """Two routers, two engines and the store between them."""

    store: Server
    routers: Sequence[Server]
    ports: Sequence[int]

    async def stored_blocks(self, http: aiohttp.ClientSession) -> int:
        async with http.get(f"{self.store.lives[-1].http}/stats") as answer:
            blocks: int = (await answer.json())["blocks"]
            return blocks


async def started(children: Children) -> Fleet:
    kv, side, *ports = (free_port() for _ in range(4))
    address = ("--store", f"kv://127.0.0.1:{kv}")
    where = ("--port", str(kv), "--http-port", str(side), "--memory", "256MiB")
    store = Server(children, "store", "store", *where)
    await store.start()
    sim = ("sim", "--port", "0", "--model", "sim", "--block-size", str(BLOCK_TOKENS), *address)
    latency = ("--inter-token-latency", f"{TOKEN_S * 1000:g}ms")
    prefill, decode = await asyncio.gather(
        children.start("prefill", *sim, "--role", "prefill"),
        children.start("decode", *sim, "--role", "decode", *latency),
    )
    engines = ("--prefill", prefill.http, "--decode", decode.http, *address)
    routers = [
        Server(children, f"router-{port}", "serve", "--port", str(port), *engines, *DRAIN)
        for port in ports
    ]
    await asyncio.gather(*(router.start() for router in routers))
    return Fleet(store, routers, ports)


async def at_once(_: Path) -> None:
    """NGINX asks a router that is back with the next request."""


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("proxy", "seen"),
    [
        pytest.param(
            *(nginx, at_once),
            marks=pytest.mark.skipif(nginx_program() is None, reason=NO_NGINX),
            id="nginx",
        ),
        pytest.param(
            *(envoy, until_envoy_sees_all),
            marks=pytest.mark.skipif(envoy_program() is None, reason=NO_ENVOY),
            id="envoy",
        ),
        pytest.param(
            *(haproxy, until_haproxy_sees_all),
            marks=pytest.mark.skipif(haproxy_program() is None, reason=NO_HAPROXY),
            id="haproxy",
        ),
    ],
)
async def test_a_rolling_restart_fails_no_request_that_had_no_byte_yet(
    proxy: Callable[[Path, Sequence[int]], AbstractAsyncContextManager[str]],
    seen: Callable[[Path], Awaitable[None]],
    tmp_path: Path,
) -> None:
    async with Children(tmp_path) as children, aiohttp.ClientSession() as http:
        fleet = await started(children)
        async with proxy(tmp_path, fleet.ports) as url, asyncio.TaskGroup() as clients:
            traffic = Traffic(url, http)
            for stream in (False, True):
                for tokens in (SHORT_TOKENS, LONG_TOKENS) * WORKERS:
                    clients.create_task(traffic.client(stream=stream, tokens=tokens))
            while len(traffic.under_way) < 4 * WORKERS:
                await asyncio.sleep(0)
            for server in (*fleet.routers, fleet.store):
                await traffic.settled()
                assert await fleet.stored_blocks(http)
                await server.restart()
                await seen(tmp_path)
            await traffic.settled()
            await traffic.settled()
            assert await fleet.stored_blocks(http)
            traffic.over.set()
        check(traffic.seen, [line for each in fleet.routers for line in each.cut_off()])


def check(seen: list[Seen], lines: list[Json]) -> None:
    cut = [one for one in seen if one.error is not None]
    failed = [one for one in seen if not one.done]
    assert not failed
    assert cut
    assert all(one.stream and one.begun and one.tokens for one in cut)
    assert {one.error["code"] for one in cut if one.error is not None} == {503}
    streams = [line for line in lines if line["status"] == 200]
    assert len(streams) == len(cut)
    assert sorted(line["generated"] for line in streams) == sorted(one.tokens for one in cut)
    moved = [line for line in lines if line["status"] == 503]
    assert moved  # and answered by the other router: their clients noticed nothing
    assert all(not line["stream"] for line in moved)
