"""`python -m tests.chaos.frozen`: engines fall silent one after another, and others only seem to.

By default settings, under a minute of traffic, one of four engines is stopped for 15 s in turn:
SIGSTOP for all of it, SIGUSR1 for its core behind a server that answers. Beside that, nothing may
happen to engines that are only slow: a prompt that takes two minutes, a parser that holds text back
for one, a server that answers no health check for 20 s while it serves. Prints what happened; exit
status 0 only if the bars hold.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

import aiohttp
import uvloop
from tests.chaos.only_slow import START_S, OnlySlow
from tests.chaos.report import say

from kvrouter.tools.demo.children import Child, Children

TURN_S = 15.0
SECONDS = 60.0
GAP_S = 0.02
RATE = 6.0
STEADY_TOKENS = 120
"""2.4 s: a stream that one turn stops for 11 s ends before the next turn could stop it too."""
MOST_EXCESS_S = {"decode": 15.0, "prefill": 30.0}
BACK_S = 8.0
"""After a turn its engine may be away for as long: it is tried before it joins."""


@dataclass
class Scenario:
    """Four engines and a router, and what happens to the engines.

    Attributes:
        roles: of the engines; all `both` is no disaggregation.
        stop, go: the signals.
    """

    name: str
    roles: tuple[str, ...]
    stop: signal.Signals
    go: signal.Signals
    resume: bool = False
    problems: list[str] = field(default_factory=list)
    asked: int = 0
    broke_off: int = 0
    excess_s: float = 0.0
    stopped: list[tuple[float, int]] = field(default_factory=list)

    async def start(self, children: Children, http: aiohttp.ClientSession) -> None:
        """Start the processes; returns when all engines have joined."""
        self._http, self._random = http, Random(self.name)
        self._engines = [
            await self._engine(children, at, role) for at, role in enumerate(self.roles)
        ]
        self._router = await children.start(f"{self.name} router", *self._flags(), start_s=START_S)
        await self._until_all_joined()

    async def run(self) -> None:
        """A minute of traffic."""
        self._begun_s = monotonic()
        faults, watch = asyncio.create_task(self._faults()), asyncio.create_task(self._watch())
        async with asyncio.TaskGroup() as requests:
            for _ in range(4):
                requests.create_task(self._steady(STEADY_TOKENS))
            while self._now_s < SECONDS:
                requests.create_task(self._ask(self._random.random() < 0.8, tokens=40))
                await asyncio.sleep(self._random.expovariate(RATE))
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await faults
        await self._judge()

    @property
    def _now_s(self) -> float:
        return monotonic() - self._begun_s

    @property
    def _kind(self) -> str:
        return "prefill" if "prefill" in self.roles else "decode"

    def _flags(self) -> list[str]:
        named: dict[str, list[str]] = {"prefill": [], "decode": []}
        for role, engine in zip(self.roles, self._engines, strict=True):
            named["prefill" if role == "prefill" else "decode"].append(engine.http)
        more = ["--prefill", *named["prefill"]] if named["prefill"] else []
        more += ["--resume-streams"] if self.resume else []
        return ["serve", "--port", "0", "--admin", *more, "--decode", *named["decode"]]

    async def _engine(self, children: Children, at: int, role: str) -> Child:
        times = ("--inter-token-latency", f"{GAP_S * 1000:g}ms", "--prefill-overhead", "50ms")
        return await children.start(
            f"{self.name} {at}",
            *("sim", "--port", "0", "--model", "m", "--role", role),
            *times,
            start_s=START_S,
        )

    async def _faults(self) -> None:
        for turn in range(round(SECONDS / TURN_S)):
            at = turn % len(self._engines)
            await asyncio.sleep(max(0.0, turn * TURN_S + 1 - self._now_s))
            self.stopped.append((self._now_s, at))
            os.kill(self._engines[at].pid, self.stop)
            await asyncio.sleep(TURN_S - 1)
            os.kill(self._engines[at].pid, self.go)

    async def _steady(self, tokens: int) -> None:
        while self._now_s < SECONDS:
            await self._ask(True, tokens)

    async def _ask(self, stream: bool, tokens: int) -> None:
        prompt = [self._random.randrange(1000) for _ in range(100)]
        body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "stream": stream}
        begun_s, own_s = self._now_s, 0.1 + tokens * GAP_S
        url = f"{self._router.http}/v1/completions"
        async with self._http.post(url, json={**body, "temperature": 0}) as answer:
            said = await answer.text()
        excess_s = self._now_s - begun_s - own_s
        self.asked += 1
        self.excess_s = max(self.excess_s, excess_s)
        if excess_s > MOST_EXCESS_S[self._kind]:
            self.problems.append(f"at {begun_s:.1f} s: {excess_s:.1f} s over its own time")
        if answer.status != 200 or said.count('"text"') == 0:
            self.problems.append(f"at {begun_s:.1f} s: lost without content: {said[:200]}")
        elif '"error"' in said:
            self.broke_off += 1
            if self.resume or not stream:
                self.problems.append(f"at {begun_s:.1f} s: broke off: {said[-200:]}")

    async def _workers(self) -> list[dict[str, Any]]:
        async with self._http.get(f"{self._router.http}/workers") as answer:
            found: list[dict[str, Any]] = json.loads(await answer.text())["workers"]
        return found

    async def _until_all_joined(self) -> None:
        while not all(worker["status"] == "up" for worker in await self._workers()):
            await asyncio.sleep(0.1)

    async def _watch(self) -> None:
        """Note engines that are away and were not stopped lately."""
        urls = [engine.http for engine in self._engines]
        while True:
            for worker in await self._workers():
                away = worker["status"] != "up"
                at, now_s = urls.index(worker["url"]), self._now_s
                if away and not any(
                    of == at and 0 <= now_s - begun_s <= TURN_S + BACK_S
                    for begun_s, of in self.stopped
                ):
                    self.problems.append(f"at {now_s:.1f} s: {worker['url']} out: {worker}")
            await asyncio.sleep(0.25)

    async def _judge(self) -> None:
        async with self._http.get(f"{self._router.http}/metrics") as answer:
            rows = (await answer.text()).splitlines()
        left = sorted(
            row.removeprefix("kvrouter:engines_left_total")
            for row in rows
            if row.startswith("kvrouter:engines_left_total{")
        )
        if not left:
            self.problems.append("no engine was found dead")
        most = f"longest {self.excess_s:.1f} s over its own time"
        say(f"{self.name}: {self.asked} requests, {most}, {self.broke_off} streams ended with an")
        say(f"  error event after content; engines left {', '.join(left)}")
        for problem in self.problems[:10]:
            say(f"  PROBLEM {problem}")


def scenarios() -> list[Scenario]:
    """What is run, all at the same time."""
    whole, split = ("both",) * 4, ("prefill", "decode", "prefill", "decode")
    stop, go = signal.SIGSTOP, signal.SIGCONT
    return [
        Scenario("frozen", whole, stop, go),
        Scenario("frozen, resumed", whole, stop, go, resume=True),
        Scenario("frozen, prefill and decode", split, stop, go),
        Scenario("core hangs", whole, signal.SIGUSR1, signal.SIGUSR2),
    ]


async def drill(folder: Path) -> bool:
    """Run everything; whether the bars hold."""
    run: list[Scenario | OnlySlow] = [*scenarios(), OnlySlow()]
    unlimited = aiohttp.TCPConnector(limit=0)
    async with Children(folder) as children, aiohttp.ClientSession(connector=unlimited) as http:
        for one in run:
            await one.start(children, http)
        say(f"started; {SECONDS:g} s of traffic, a stop of {TURN_S:g} s each {TURN_S:g} s")
        await asyncio.gather(*(one.run() for one in run))
    problems = sum(len(one.problems) for one in run)
    say("the bars hold" if not problems else f"{problems} problems")
    return not problems


def main() -> int:
    """Run it; the exit status."""
    with tempfile.TemporaryDirectory(prefix="kvrouter-frozen-") as folder:
        return 0 if uvloop.run(drill(Path(folder))) else 1


if __name__ == "__main__":
    sys.exit(main())
