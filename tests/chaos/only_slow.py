"""Engines that only seem dead, before a router by default settings: none may leave."""

import asyncio
import json
from time import monotonic
from typing import Any

import aiohttp
from tests.chaos.report import say
from tests.fakes.engine import FakeEngine

from kvrouter.http.headers import SSE_HEADERS
from kvrouter.http.server.exchange import Exchange
from kvrouter.tools.demo.children import Children

PREFILL_S = 120
HELD_BACK_S = 60
UNHEALTHY_S = 20
TOKENS = 12_000
START_S = 120.0
"""Until a process is ready, on a machine that is busy."""


class Parser(FakeEngine):
    """Generates all the time, and holds the text of a tool call back for a minute."""

    async def start(self) -> None:
        await super().start()
        self.pages["/metrics"] = self._metrics

    async def _metrics(self, exchange: Exchange) -> None:
        line = f'vllm:generation_tokens_total{{engine="0"}} {monotonic() * 30:.0f}\n'
        exchange.respond(200, line.encode(), content_type="text/plain")

    async def _stream(self, exchange: Exchange, body: dict[str, Any], mode: str) -> None:
        exchange.start(200, SSE_HEADERS)
        exchange.write(self.event(0, last=False))
        await asyncio.sleep(HELD_BACK_S)
        exchange.write(self.event(1, last=True) + b"data: [DONE]\n\n")
        exchange.end()


class OnlySlow:
    """The engines, their router, and what goes wrong."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._fakes: list[FakeEngine] = [Parser("held"), Parser("held"), FakeEngine("busy")]

    async def start(self, children: Children, http: aiohttp.ClientSession) -> None:
        """Start the processes; returns when all engines have joined."""
        self._http = http
        per_token = ("--prefill-time-per-token", f"{PREFILL_S / TOKENS * 1000:g}ms")

        async def sim(name: str, model: str, *flags: str) -> str:
            arguments = ("sim", "--port", "0", "--model", model, *flags)
            return (await children.start(name, *arguments, start_s=START_S)).http

        prefill = await sim("prefill", "split", "--role", "prefill", *per_token)
        decode = [await sim("decode", "split", "--role", "decode")]
        for at in (0, 1):
            decode.append(await sim(f"alone {at}", "alone", *per_token))
            decode.append(await sim(f"thinks {at}", "thinks", "--inter-token-latency", "1s"))
        for fake in self._fakes:
            await fake.start()
            decode.append(fake.address)
        flags = ("serve", "--port", "0", "--admin", "--prefill", prefill, "--decode", *decode)
        self._router = (await children.start("slow router", *flags, start_s=START_S)).http
        while await self._away():
            await asyncio.sleep(0.1)

    async def run(self) -> None:
        """Ask each of them for what it takes so long for."""
        prompt = [at % 1000 for at in range(TOKENS)]
        await asyncio.gather(
            self._ask("split", 2, prompt, stream=True),
            *(self._ask("alone", 2, prompt[::-1], stream=stream) for stream in (False, True)),
            *(self._ask("thinks", 100, [1], stream=True) for _ in (0, 1)),
            *(self._ask("held", 2, [1, 2], stream=True) for _ in (0, 1)),
            self._busy(),
        )
        async with self._http.get(f"{self._router}/metrics") as answer:
            rows = (await answer.text()).splitlines()
        self.problems += [row for row in rows if row.startswith("kvrouter:engines_left_total{")]
        self.problems += await self._away()
        for fake in self._fakes:
            await fake.stop()
        for problem in self.problems:
            say(f"  PROBLEM {problem}")
        say(f"only slow: {len(self.problems)} false alarms or failures")

    async def _ask(self, model: str, tokens: int, prompt: list[int], *, stream: bool) -> None:
        body = {"model": model, "max_tokens": tokens, "prompt": prompt, "stream": stream}
        url, begun_s = f"{self._router}/v1/completions", monotonic()
        async with self._http.post(url, json=body, timeout=aiohttp.ClientTimeout(400)) as answer:
            said = await answer.text()
        if model != "busy":
            kind, took_s = "stream" if stream else "whole", monotonic() - begun_s
            say(f"only slow: {model}, {kind}: {answer.status} in {took_s:.1f} s")
        if answer.status != 200 or '"error"' in said:
            self.problems.append(f"{model}: {said[-300:]}")

    async def _busy(self) -> None:
        """A server that answers no health check while it serves."""
        healthy, until_s = self._fakes[-1].healthy, monotonic() + UNHEALTHY_S
        healthy.clear()
        while monotonic() < until_s:
            await self._ask("busy", 2, [1, 2], stream=False)
            await asyncio.sleep(0.5)
        healthy.set()

    async def _away(self) -> list[str]:
        async with self._http.get(f"{self._router}/workers") as answer:
            workers = json.loads(await answer.text())["workers"]
        return [str(worker) for worker in workers if worker["status"] != "up"]
