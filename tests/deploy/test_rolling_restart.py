"""Two routers behind a real NGINX are restarted one after the other, under traffic."""

import asyncio
import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.fakes.nginx import MISSING, nginx, nginx_program

from kvrouter.tools.demo.children import Child, Children
from kvrouter.tools.demo.cluster import free_port

DRAIN = ("--drain-delay", "0.5", "--drain-timeout", "2")
TOKEN_S = 0.02
SHORT_TOKENS = 10
LONG_TOKENS = 250
"""5 s: longer than the drain."""
WORKERS = 3
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
        body = {"model": "sim", "prompt": "a b c", "max_tokens": tokens, "stream": stream}
        try:
            async with self.http.post(f"{self.url}/v1/completions", json=body) as answer:
                seen.status = answer.status
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


class Roll:
    """The routers, each of which can be restarted on its port."""

    def __init__(self, children: Children, ports: Sequence[int], flags: Sequence[str]) -> None:
        self._children = children
        self.ports = ports
        self._flags = flags
        self._lives = count()
        self._routers: dict[int, Child] = {}
        self.lives: list[Child] = []

    async def start(self, k: int) -> None:
        flags = ("--port", str(self.ports[k]), *self._flags)
        name = f"router-{k}-{next(self._lives)}"
        self._routers[k] = await self._children.start(name, "serve", *flags)
        self.lives.append(self._routers[k])

    async def restart(self, k: int) -> None:
        process = self._routers[k].process
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
        await self.start(k)

    def cut_off(self) -> list[Json]:
        """The lines of requests that a router cut off."""
        logs = (self._children.logged(life).splitlines() for life in self.lives)
        lines = [json.loads(line) for log in logs for line in log if line.startswith("{")]
        return [line for line in lines if line.get("outcome") == "cut_off"]


async def started(children: Children) -> Roll:
    latency = ("--inter-token-latency", f"{TOKEN_S * 1000:g}ms", "--max-num-seqs", "256")
    engine = await children.start("engine", "sim", "--port", "0", "--model", "sim", *latency)
    ports = [free_port(), free_port()]
    roll = Roll(children, ports, ("--decode", engine.http, *DRAIN))
    await asyncio.gather(roll.start(0), roll.start(1))
    return roll


@pytest.mark.skipif(nginx_program() is None, reason=MISSING)
async def test_a_rolling_restart_fails_no_request_that_had_no_byte_yet(tmp_path: Path) -> None:
    async with Children(tmp_path) as children, aiohttp.ClientSession() as http:
        roll = await started(children)
        ports = roll.ports
        async with nginx(tmp_path, ports) as url, asyncio.TaskGroup() as clients:
            traffic = Traffic(url, http)
            for stream in (False, True):
                for tokens in (SHORT_TOKENS, LONG_TOKENS) * WORKERS:
                    clients.create_task(traffic.client(stream=stream, tokens=tokens))
            while len(traffic.under_way) < 4 * WORKERS:
                await asyncio.sleep(0)
            for k in (0, 1):
                await traffic.settled()
                await roll.restart(k)
            await traffic.settled()
            traffic.over.set()
        check(traffic.seen, roll.cut_off())


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
