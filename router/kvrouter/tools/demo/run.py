"""`kvrouter demo`: starts a cluster, sends requests, kills an engine, prints figures, stops all."""

import asyncio
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from operator import add, sub
from pathlib import Path
from statistics import median, quantiles
from typing import TextIO

import aiohttp
from tabulate import tabulate

from kvrouter.tools.demo.children import (
    DECODE,
    MODEL,
    PREFILL,
    Child,
    ChildFailed,
    Children,
    Cluster,
    demo_folder,
    start_cluster,
)
from kvrouter.tools.demo.settings import DemoSettings
from kvrouter.tools.demo.workload import Reply, Workload, conversations
from kvrouter.tools.sim.kv_bytes import Oracle
from kvrouter.tools.sim.settings import SimSettings

READY_S = 20.0
BUSY_S = 0.3
_RUNNING = re.compile(r"^vllm:num_requests_running\{.*\} [1-9]", re.MULTILINE)
_BY_SOURCE = re.compile(
    r'^vllm:prompt_tokens_by_source_total\{.*source="(\w+)".*\} (\S+)$', re.MULTILINE
)
_WRONG = re.compile(r"^kvsim:wrong_blocks_total\{.*\} (\S+)$", re.MULTILINE)

_REDRAW_S = 0.1


class Progress:
    """One line that changes on a terminal, plain lines in a pipe.

    `step` says what begins, `count` how far it is, `line` what stays on the screen.
    """

    def __init__(self, out: TextIO = sys.stdout) -> None:
        self._out = out
        self._live = out.isatty()
        self._step = ""
        self._drawn_s = 0.0
        self._began_s = time.monotonic()

    def line(self, text: str = "") -> None:
        """Print a line that stays."""
        self._draw(f"{text}\n")

    def step(self, text: str) -> None:
        """Begin a step."""
        self._step = text
        self._draw(text if self._live else f"[{time.monotonic() - self._began_s:5.1f} s] {text}\n")

    def count(self, done: int, of: int) -> None:
        """Show on a terminal how far the step is, at most ten times a second."""
        now_s = time.monotonic()
        if self._live and (done == of or now_s - self._drawn_s >= _REDRAW_S):
            self._drawn_s = now_s
            self._draw(f"{self._step} {done}/{of}")

    def _draw(self, text: str) -> None:
        print(f"\r\x1b[K{text}" if self._live else text, end="", file=self._out, flush=True)


@dataclass(frozen=True)
class Counted:
    """Prompt tokens of an engine by the source of their KV, and loaded blocks that were wrong."""

    computed: int = 0
    own: int = 0
    store: int = 0
    wrong_blocks: int = 0

    @classmethod
    def read(cls, exposition: str) -> "Counted":
        """The figures of an engine's /metrics."""
        found = {source: int(float(value)) for source, value in _BY_SOURCE.findall(exposition)}
        return cls(
            found.get("local_compute", 0),
            found.get("local_cache_hit", 0),
            found.get("external_kv_transfer", 0),
            sum(int(float(value)) for value in _WRONG.findall(exposition)),
        )

    @property
    def total(self) -> int:
        """All prompt tokens whose KV the engine needed."""
        return self.computed + self.own + self.store

    def share(self, tokens: int) -> float:
        """So many tokens as a share of all prompt tokens; 0 if there are none."""
        return tokens / self.total if self.total else 0.0

    def __add__(self, other: "Counted") -> "Counted":
        return Counted(*map(add, astuple(self), astuple(other)))

    def __sub__(self, other: "Counted") -> "Counted":
        return Counted(*map(sub, astuple(self), astuple(other)))


def ttft_line(name: str, replies: Sequence[Reply]) -> str:
    """Median and 95th percentile of the time to first token of the answers without problems."""
    times = [reply.ttft_s for reply in replies if not reply.problem]
    if not times:
        return f"{name:<6} no answer"
    late = quantiles(times, n=20, method="inclusive")[-1] if len(times) > 1 else times[0]
    tokens = round(sum(reply.prompt_tokens for reply in replies) / len(replies))
    return (
        f"{name:<6} {len(replies):>4} requests of about {tokens} prompt tokens:  TTFT median "
        f"{median(times) * 1000:6.1f} ms   p95 {late * 1000:6.1f} ms"
    )


def speedup(cold: Sequence[Reply], warm: Sequence[Reply]) -> float:
    """The median time to first token of `cold` over that of `warm`; 0 if one has no answer."""
    pair = [[reply.ttft_s for reply in each if not reply.problem] for each in (cold, warm)]
    return median(pair[0]) / median(pair[1]) if all(pair) else 0.0


def source_table(engines: Mapping[str, Counted], notes: Mapping[str, str]) -> str:
    """A line for each engine and one for their sum: tokens computed, cached, and loaded."""
    rows = [
        (name, counted.computed, counted.own, counted.store, notes.get(name, ""))
        for name, counted in (*engines.items(), ("all", sum(engines.values(), Counted())))
    ]
    heads = ("prompt tokens", "computed", "own cache", "from store", "")
    return tabulate(rows, heads, tablefmt="plain", intfmt=",")


@dataclass(eq=False)
class Demo:
    """One run, from an empty machine to figures."""

    settings: DemoSettings
    children: Children
    progress: Progress
    session: aiohttp.ClientSession
    cold: list[Reply] = field(default_factory=list)
    warm: list[Reply] = field(default_factory=list)
    counted: dict[str, Counted] = field(default_factory=dict)  # by the engine's name
    in_flight_at_death: int = 0

    def __post_init__(self) -> None:
        self._work = Workload(self.session, MODEL, self.settings.answer_tokens)

    async def run(self, folder: Path) -> Cluster:
        """Start the cluster, send cold and then warm requests, and check the answers."""
        settings, progress = self.settings, self.progress
        progress.step("starting a store, 2 prefill and 2 decode engines and the router")
        cluster = await start_cluster(self.children, folder, settings)
        self._work.url = cluster.router.http
        await self._ready()
        urls = f"router {cluster.router.http}   page {cluster.router.urls['page']}"
        progress.line(f"{urls}   store {cluster.store.urls['kv']}")
        progress.step(f"cold: {settings.documents} documents, each for the first time")
        for done, reader in enumerate(conversations(settings.documents, settings.documents), 1):
            self.cold.append(await self._work.ask(reader, "What is it about?"))
            progress.count(done, settings.documents)
        await self._warm(cluster)
        for engine in cluster.engines.values():
            if not engine.killed:
                self.counted[engine.name] = Counted.read(await self._metrics(engine))
        progress.step("comparing every answer")
        oracle = Oracle(SimSettings(model=MODEL).manifest)
        for reply in (*self.cold, *self.warm):
            reply.check(oracle, settings.answer_tokens)
        return cluster

    async def _warm(self, cluster: Cluster) -> None:
        """Conversations about the same documents. A prefill engine dies after a third of them."""
        settings, progress = self.settings, self.progress
        whole = settings.conversations * settings.turns
        every = conversations(settings.documents, settings.conversations)
        progress.step(f"warm: {settings.conversations} conversations of {settings.turns} turns")
        killed: list[asyncio.Task[None]] = []
        count = 0

        def done(reply: Reply) -> None:
            nonlocal count
            count += 1
            progress.count(count, whole)
            if count >= whole // 3 and not killed:
                killed.append(asyncio.create_task(self._kill(cluster.engines[PREFILL[0]])))

        self.warm = await self._work.run(every, settings.turns, settings.concurrency, done)
        await asyncio.gather(*killed)

    async def _kill(self, victim: Child) -> None:
        """SIGKILL for one prefill engine, if possible while it works on a request."""
        with suppress(TimeoutError):
            async with asyncio.timeout(BUSY_S):
                while True:
                    if _RUNNING.search(await self._metrics(victim)):
                        break
                    await asyncio.sleep(0.005)
        self.counted[victim.name] = Counted.read(await self._metrics(victim))
        self.in_flight_at_death = self._work.in_flight
        self.progress.line(f"killing {victim.name} (SIGKILL, pid {victim.pid}) under load")
        await self.children.kill(victim)

    async def _ready(self) -> None:
        """Return when the router serves the engines' model. Raises ChildFailed."""
        try:
            async with asyncio.timeout(READY_S):
                while True:
                    async with self.session.get(f"{self._work.url}/v1/models") as answer:
                        if answer.status == 200 and MODEL in await answer.text():
                            return
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise ChildFailed(f"the router did not find its engines within {READY_S:g} s") from None

    async def _metrics(self, engine: Child) -> str:
        async with self.session.get(f"{engine.http}/metrics") as answer:
            return await answer.text()

    def report(self) -> bool:
        """Print the figures; whether all answers were right."""
        progress, whole = self.progress, sum(self.counted.values(), Counted())
        sooner = speedup(self.cold, self.warm)
        comparison = f"   ({sooner:.1f} times sooner)" if sooner > 1 else ""
        progress.line("\n" + ttft_line("cold", self.cold))
        progress.line(ttft_line("warm", self.warm) + comparison + "\n")
        ordered = {name: self.counted[name] for name in (*PREFILL, *DECODE)}
        progress.line(source_table(ordered, {PREFILL[0]: "(until it was killed)"}))
        progress.line(
            f"hit rate {whole.share(whole.own + whole.store):.1%}: "
            f"{whole.share(whole.own):.1%} cached by the engines, "
            f"{whole.share(whole.store):.1%} loaded from the store, every byte of it compared\n"
        )
        replies = [*self.cold, *self.warm]
        problems = [reply.problem for reply in replies if reply.problem]
        for problem in problems:
            progress.line(f"FAILED {problem}")
        progress.line(
            f"{len(replies) - len(problems)} of {len(replies)} answers complete and right; "
            f"{PREFILL[0]} was killed with {self.in_flight_at_death} requests in flight; "
            f"{whole.wrong_blocks} blocks were wrong"
        )
        return not problems and not whole.wrong_blocks


async def _demo(settings: DemoSettings) -> int:
    progress, connector = Progress(), aiohttp.TCPConnector(limit=0)
    with demo_folder() as folder:
        async with (
            Children(folder) as children,
            aiohttp.ClientSession(connector=connector) as session,
        ):
            demo = Demo(settings, children, progress, session)
            try:
                cluster = await demo.run(folder)
            except (ChildFailed, aiohttp.ClientError) as error:
                progress.line(f"kvrouter demo: {error}")
                return 1
            well = demo.report()
            for dead in children.unexpected_deaths():
                progress.line(f"FAILED {dead} died")
                well = False
            if not well:
                progress.line(f"the end of the router's log:\n{children.log_tail(cluster.router)}")
            if settings.keep:
                body = f'{{"model": "{MODEL}", "prompt": "Hello", "max_tokens": 32}}'
                progress.line(
                    f"\nIt runs until Ctrl-C. Try:\n  curl {cluster.router.http}/v1/completions "
                    f"-H 'content-type: application/json' -d '{body}'"
                )
                with suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
            return 0 if well else 1


async def _until_signalled(settings: DemoSettings) -> int:
    """Run the demo. SIGINT or SIGTERM ends it and everything that it started."""
    loop, demo = asyncio.get_running_loop(), asyncio.create_task(_demo(settings))
    for number in (signal.SIGINT, signal.SIGTERM):  # later ones must not break off the clean-up
        loop.add_signal_handler(number, lambda: demo.cancelling() or demo.cancel())
    try:
        return await demo
    except asyncio.CancelledError:
        print("kvrouter demo: stopped", file=sys.stderr)
        return 130


def run(settings: DemoSettings) -> int:
    """Run the demo; 0 if every answer was complete and right, else 1."""
    return asyncio.run(_until_signalled(settings))
