"""The planner benchmark's client: sends each request at its time, and times its tokens."""

import asyncio
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import aiohttp
from tests.chaos.gauges import total

from benchmarks.planner_load import Ask

SAMPLES_PER_S = 10.0
_EVENT = b'"choices":[{'


@dataclass
class Reply:
    """The result of one request; times in seconds."""

    late_s: float  # it was sent so long after its time
    first_s: float = 0.0  # to its first token
    whole_s: float = 0.0  # to its end
    gaps_s: list[float] = field(default_factory=list)  # between its tokens


@dataclass
class Watch:
    """Samples the share of each engine's cache that requests hold."""

    http: aiohttp.ClientSession
    engines: Sequence[str]
    samples: list[tuple[float, list[float]]] = field(default_factory=list)

    async def run(self, begin_s: float) -> None:
        """Sample until cancelled; times start at `begin_s`."""
        while True:
            now_s = time.perf_counter()
            held = await asyncio.gather(*(self._held(url) for url in self.engines))
            self.samples.append((now_s - begin_s, held))
            await asyncio.sleep(max(0.0, 1 / SAMPLES_PER_S - (time.perf_counter() - now_s)))

    async def _held(self, url: str) -> float:
        async with self.http.get(f"{url}/metrics") as answer:
            return total(await answer.text(), "vllm:kv_cache_usage_perc")


async def send(http: aiohttp.ClientSession, url: str, ask: Ask, due_s: float) -> Reply:
    """Send one request at its time, and read its stream."""
    members = {"prompt": ask.prompt, "max_tokens": ask.max_tokens, "stream": True}
    body = json.dumps({"model": "tiny", **members}).encode()
    await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
    began_s = last_s = time.perf_counter()
    reply, events = Reply(began_s - due_s), 0
    async with http.post(f"{url}/v1/completions", data=body) as answer:
        assert answer.status == 200, await answer.text()
        async for piece in answer.content.iter_any():
            came = piece.count(_EVENT)
            if came:
                now_s = time.perf_counter()
                if events:
                    reply.gaps_s.append(now_s - last_s)
                else:
                    reply.first_s = now_s - began_s
                reply.gaps_s += [0.0] * (came - 1)
                events, last_s = events + came, now_s
    assert events == ask.max_tokens, (events, ask.max_tokens)
    reply.whole_s = time.perf_counter() - began_s
    return reply


async def drive(
    url: str, asks: Iterable[Ask], engines: Sequence[str]
) -> tuple[list[Reply], list[tuple[float, list[float]]]]:
    """Send all requests; the replies in their order, and the shares of `engines` meanwhile."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        begin_s = time.perf_counter() + 0.5
        watch = Watch(http, engines)
        watching = asyncio.create_task(watch.run(begin_s))
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(send(http, url, ask, begin_s + ask.at_s)) for ask in asks
                ]
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
    return [task.result() for task in tasks], watch.samples
