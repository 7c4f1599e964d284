"""`kvrouter demo`: starts a cluster, sends requests, kills an engine, prints figures, stops all."""

import asyncio
import re
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from kvrouter.tools.demo.children import Child, ChildFailed, Children
from kvrouter.tools.demo.cluster import (
    DECODE,
    MODEL,
    PREFILL,
    Cluster,
    demo_folder,
    start_cluster,
)
from kvrouter.tools.demo.figures import Counted, Progress, source_table, speedup, ttft_line
from kvrouter.tools.demo.settings import DemoSettings
from kvrouter.tools.demo.workload import Reply, Workload, conversations
from kvrouter.tools.sim.oracle import Oracle
from kvrouter.tools.sim.settings import SimSettings

READY_S = 20.0
BUSY_S = 0.3
_RUNNING = re.compile(r"^vllm:num_requests_running\{.*\} [1-9]", re.MULTILINE)


@dataclass(eq=False)
class Demo:
    """One run, from an empty machine to figures.

    Attributes:
        cold, warm: replies.
        counted: what engines counted, by their names.
    """

    settings: DemoSettings
    children: Children
    progress: Progress
    session: aiohttp.ClientSession
    cold: list[Reply] = field(default_factory=list)
    warm: list[Reply] = field(default_factory=list)
    counted: dict[str, Counted] = field(default_factory=dict)
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
