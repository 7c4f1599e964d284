"""`kvrouter demo`: starts all, asks, kills an engine, prints figures. Leaves nothing behind."""

import asyncio
import re
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from kvrouter.tools.demo.children import Child, ChildFailed, Children
from kvrouter.tools.demo.cluster import Cluster, Setup
from kvrouter.tools.demo.figures import Counted, hit_rate, source_table, speedup, ttft_line
from kvrouter.tools.demo.find_vllm import find_vllm
from kvrouter.tools.demo.folder import demo_folder
from kvrouter.tools.demo.progress import Progress
from kvrouter.tools.demo.settings import DemoSettings
from kvrouter.tools.demo.simulated import Simulated
from kvrouter.tools.demo.vllm_engines import VllmEngines
from kvrouter.tools.demo.workload import Reply, Workload, conversations

__all__ = ["run"]

READY_S = 20.0
BUSY_S = 0.3


@dataclass
class DemoOutcome:
    """What came of it."""

    cold: list[Reply] = field(default_factory=list)
    warm: list[Reply] = field(default_factory=list)
    engines: dict[str, Counted] = field(default_factory=dict)
    under_way_at_death: int = 0

    @property
    def problems(self) -> list[str]:
        """What went wrong, in the clients' words."""
        return [reply.problem for reply in (*self.cold, *self.warm) if reply.problem]


class Demo:
    """One run, from an empty machine to figures."""

    def __init__(
        self,
        settings: DemoSettings,
        setup: Setup,
        children: Children,
        progress: Progress,
        session: aiohttp.ClientSession,
    ) -> None:
        self._settings = settings
        self._setup = setup
        self._session = session
        self._children = children
        self._progress = progress
        self._victim = setup.prefill[0]
        self._work = Workload(
            *(session, setup.model, settings.answer_tokens),
            request_s=setup.request_s,
            more=setup.more,
        )
        self.outcome = DemoOutcome()

    async def run(self, folder: Path) -> Cluster:
        """Start all, then the cold and the warm part of the workload; compare the answers."""
        settings, setup, progress = self._settings, self._setup, self._progress
        progress.step(setup.opening())
        cluster = await setup.start(self._children, self._session, folder)
        await _ready(self._session, cluster.router.http, setup.model)
        urls = f"router {cluster.router.http}   page {cluster.router.urls['page']}"
        progress.line(f"{urls}   store {cluster.store.urls['kv']}")
        self._work.url = cluster.router.http
        progress.step(f"cold: {settings.documents} documents, each for the first time")
        for done, reader in enumerate(conversations(settings.documents, settings.documents), 1):
            self.outcome.cold.append(await self._work.ask(reader, "What is it about?"))
            progress.count(done, settings.documents)
        await self._warm(cluster)
        self.outcome.engines |= await _counted(self._session, cluster, but={self._victim})
        progress.step("comparing every answer")
        for part in (self.outcome.cold, self.outcome.warm):
            part[:] = await setup.checked(self._session, cluster, part)
        return cluster

    async def _warm(self, cluster: Cluster) -> None:
        """Conversations about the same documents; a prefill engine dies in their midst."""
        settings, progress = self._settings, self._progress
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
                killed.append(asyncio.create_task(self._kill(cluster.engines[self._victim])))

        self.outcome.warm = await self._work.run(every, settings.turns, settings.concurrency, done)
        await asyncio.gather(*killed)

    async def _kill(self, victim: Child) -> None:
        """SIGKILL for one prefill engine while requests are under way."""
        await _busy(self._session, victim)
        self.outcome.engines[victim.name] = await _count(self._session, victim)
        self.outcome.under_way_at_death = self._work.under_way
        self._progress.line(f"killing {victim.name} (SIGKILL, pid {victim.pid}) in the midst of it")
        await self._children.kill(victim)


async def _ready(session: aiohttp.ClientSession, url: str, model: str) -> None:
    """Return when the router serves the engines' model. Raises ChildFailed where it never does."""
    try:
        async with asyncio.timeout(READY_S):
            while True:
                async with session.get(f"{url}/v1/models") as answer:
                    if answer.status == 200 and model in await answer.text():
                        return
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise ChildFailed(f"the router did not find its engines within {READY_S:g} s") from None


async def _count(session: aiohttp.ClientSession, engine: Child) -> Counted:
    async with session.get(f"{engine.http}/metrics") as answer:
        return Counted.read(await answer.text())


async def _busy(session: aiohttp.ClientSession, engine: Child) -> None:
    """Return when the engine works on something, or after a moment in which it does not."""
    running = re.compile(r"^vllm:num_requests_running\{.*\} [1-9]", re.MULTILINE)
    try:
        async with asyncio.timeout(BUSY_S):
            while True:
                async with session.get(f"{engine.http}/metrics") as answer:
                    if running.search(await answer.text()):
                        return
                await asyncio.sleep(0.005)
    except TimeoutError:
        return


async def _counted(
    session: aiohttp.ClientSession, cluster: Cluster, but: set[str]
) -> dict[str, Counted]:
    return {
        name: await _count(session, engine)
        for name, engine in cluster.engines.items()
        if name not in but
    }


def report(outcome: DemoOutcome, setup: Setup, progress: Progress) -> bool:
    """Print the figures; whether all was well."""
    every = [*outcome.cold, *outcome.warm]
    whole = sum(outcome.engines.values(), Counted())
    progress.line()
    progress.line(ttft_line("cold", outcome.cold))
    sooner = speedup(outcome.cold, outcome.warm)
    comparison = f"   ({sooner:.1f} times sooner)" if sooner > 1 else ""
    progress.line(ttft_line("warm", outcome.warm) + comparison)
    progress.line()
    victim = setup.prefill[0]
    ordered = {name: outcome.engines[name] for name in (*setup.prefill, *setup.decode)}
    for line in source_table(ordered, {victim: "(up to its death)"}):
        progress.line(line)
    progress.line(
        f"hit rate {hit_rate(whole):.1%}: {whole.own / whole.total:.1%} held by the engines, "
        f"{whole.store / whole.total:.1%} loaded from the store, {setup.loaded}"
    )
    progress.line()
    for problem in outcome.problems:
        progress.line(f"FAILED {problem}")
    good = len(every) - len(outcome.problems)
    progress.line(
        f"{good} of {len(every)} answers complete and right; {victim} was killed with "
        f"{outcome.under_way_at_death} requests under way; {setup.assurance(whole.wrong_blocks)}"
    )
    return not outcome.problems and not whole.wrong_blocks


def _curl(url: str, model: str) -> str:
    body = f'{{"model": "{model}", "prompt": "Once upon a time", "max_tokens": 32}}'
    return f"curl {url}/v1/completions -H 'content-type: application/json' -d '{body}'"


async def _demo(
    settings: DemoSettings, setup: Setup, stop: asyncio.Event, kept: asyncio.Event
) -> int:
    progress = Progress()
    with demo_folder() as folder:
        async with (
            Children(folder) as children,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        ):
            demo = Demo(settings, setup, children, progress, session)
            try:
                cluster = await demo.run(folder)
            except (ChildFailed, aiohttp.ClientError) as error:
                progress.line(f"kvrouter demo: {error}")
                return 1
            well = report(demo.outcome, setup, progress)
            for dead in children.unexpected_deaths():
                progress.line(f"FAILED {dead} died")
                well = False
            if not well:
                progress.line(f"the router's last words:\n{children.last_words(cluster.router)}")
            if settings.keep:
                progress.line(
                    f"\nIt stays up until Ctrl-C. Try:\n  {_curl(cluster.router.http, setup.model)}"
                )
                kept.set()
                await stop.wait()
            return 0 if well else 1


async def _until_signalled(settings: DemoSettings, setup: Setup) -> int:
    """Run the demo; SIGINT or SIGTERM ends it, and everything that it started."""
    stop, kept = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    demo = asyncio.create_task(_demo(settings, setup, stop, kept))
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait([demo, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not demo.done() and not kept.is_set():
        demo.cancel()
    try:
        return await demo
    except asyncio.CancelledError:
        print("kvrouter demo: stopped", file=sys.stderr)
        return 130


def run(settings: DemoSettings) -> int:
    """Run the demo; 0 where every answer was complete and right, 1 where one was not.

    Raises UsageError where vLLM engines are asked for and cannot be had.
    """
    setup: Setup
    if settings.engine == "vllm":
        setup = VllmEngines(settings, find_vllm(settings.vllm_python))
    else:
        setup = Simulated(settings)
    return asyncio.run(_until_signalled(settings, setup))
