"""How soon a router acts on each kind of discovery, under load.

    python -m benchmarks.discovery [--rounds 6] [--json FILE]

One `kvrouter serve` for each kind, with default intervals, in front of three small engines. It gets
50 requests a second, every second one a stream. In each round one engine is removed from the source
and added again. The time begins with the change of the source (for Redis: with the SIGTERM of
`kvrouter register`, and with its registration) and ends when GET /workers shows the engine drained
or up. At the end Redis is killed and started again without data. Exit status 1 if a request failed.
"""

import asyncio
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import aiohttp
from tests.fakes.discovery import FileBackend, dns_server
from tests.fakes.engine import FakeEngine
from tests.fakes.redis import RedisServer

from benchmarks.arguments import parser_of
from kvrouter.engines.engine import Role
from kvrouter.tools.demo.children import Child, Children

__all__ = ["Figures"]

PACE_S, LOOK_S, PATIENCE_S = 0.02, 0.005, 60.0
KINDS = ("file", "dns", "redis")
Change = Callable[[bool], Awaitable[None]]


@dataclass
class Figures:
    """One kind of discovery: seconds until the router acted, and results of the requests."""

    kind: str
    added_s: list[float] = field(default_factory=list)
    drained_s: list[float] = field(default_factory=list)
    answered: int = 0
    failed: int = 0
    note: str = ""

    def row(self) -> str:
        """One line of the table."""
        shown = [
            f"{statistics.median(each):.3f} | {max(each):.3f}"
            for each in (self.added_s, self.drained_s)
        ]
        return f"| {self.kind} | {shown[0]} | {shown[1]} | {self.answered} | {self.failed} |"


class Traffic:
    """Requests to one router at a steady pace."""

    def __init__(self, http: aiohttp.ClientSession, url: str, figures: Figures) -> None:
        self._http = http
        self._url = url
        self._figures = figures
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Run until cancelled; requests in flight still end."""
        number = 0
        try:
            while True:
                number += 1
                task = asyncio.create_task(self._ask(stream=number % 2 == 0))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                await asyncio.sleep(PACE_S)
        finally:
            await asyncio.gather(*self._tasks)

    async def _ask(self, *, stream: bool) -> None:
        body = {"model": "m", "prompt": "Hello", "max_tokens": 4, "stream": stream}
        try:
            async with self._http.post(f"{self._url}/v1/completions", json=body) as answer:
                content = await answer.read()
                good = answer.status == 200 and b" t3" in content and b'"error"' not in content
        except aiohttp.ClientError:
            good = False
        self._figures.answered += good
        self._figures.failed += not good


async def shown(http: aiohttp.ClientSession, url: str, address: str, *, up: bool) -> float:
    """Seconds until the router shows the engine as up, or as one that gets no legs."""
    begun = time.monotonic()
    async with asyncio.timeout(PATIENCE_S):
        while True:
            async with http.get(f"{url}/workers/{address}") as answer:
                card = await answer.json()
            if (card.get("status") == "up") if up else card.get("status") in (None, "draining"):
                return time.monotonic() - begun
            await asyncio.sleep(LOOK_S)


@asynccontextmanager
async def small_engines(count: int) -> AsyncIterator[list[FakeEngine]]:
    """Engines at one port, each on its own loopback address, as for A records."""
    made: list[FakeEngine] = []
    try:
        for number in range(count):
            engine = FakeEngine(host=f"127.0.0.{number + 11}")
            engine.port = made[0].port if made else 0
            await engine.start()
            made.append(engine)
        yield made
    finally:
        for engine in made:
            await engine.stop()


@asynccontextmanager
async def changing(
    kind: str, folder: Path, engines: list[FakeEngine], children: Children
) -> AsyncIterator[tuple[list[str], Change, RedisServer | None]]:
    """Flags of the router, and a function that names all engines (True) or all but the last."""
    if kind == "file":
        backend = FileBackend(folder)

        async def edit(whole: bool) -> None:
            named = engines if whole else engines[:-1]
            await backend.name({engine.address: Role.DECODE for engine in named})

        yield ["--discovery", backend.setting], edit, None
    elif kind == "dns":
        async with dns_server() as server:

            async def publish(whole: bool) -> None:
                named = engines if whole else engines[:-1]
                server.set("decode.test.", "A", *(engine.host for engine in named))

            place = f"decode.test.:{engines[0].port}?role=decode&resolver={server.resolver}"
            yield ["--discovery", f"dns://{place}"], publish, None
    else:
        with RedisServer(folder) as redis:
            sidecars = _Sidecars(children, redis.url, engines)
            yield ["--discovery", "redis", "--redis", redis.url], sidecars.change, redis


class _Sidecars:
    """One `kvrouter register` for each engine."""

    def __init__(self, children: Children, redis: str, engines: list[FakeEngine]) -> None:
        self._children = children
        self._redis = redis
        self._engines = engines
        self._running: dict[str, Child] = {}

    async def change(self, whole: bool) -> None:
        wanted = self._engines if whole else self._engines[:-1]
        for engine in wanted:
            if engine.address not in self._running:
                flags = ("--redis", self._redis, "--decode", engine.address)
                name = f"register-{engine.host}"
                self._running[engine.address] = await self._children.start(name, "register", *flags)
        for engine in self._engines[len(wanted) :]:
            child = self._running.pop(engine.address, None)
            if child is not None:
                child.process.terminate()


async def measure(kind: str, rounds: int, folder: Path) -> Figures:
    """Figures of one kind, from a router and engines of its own."""
    figures = Figures(kind)
    async with (
        small_engines(3) as engines,
        Children(folder) as children,
        changing(kind, folder, engines, children) as (flags, change, redis),
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        await change(True)
        router = await children.start("router", "serve", "--port", "0", "--admin", *flags)
        for engine in engines:
            await shown(http, router.http, engine.address, up=True)
        traffic = asyncio.create_task(Traffic(http, router.http, figures).run())
        for _ in range(rounds):
            for whole, times in ((False, figures.drained_s), (True, figures.added_s)):
                await change(whole)
                times.append(await shown(http, router.http, engines[-1].address, up=whole))
        if redis is not None:
            figures.note = await outage(http, router.http, redis, len(engines))
        traffic.cancel()
        await asyncio.gather(traffic, return_exceptions=True)
    return figures


async def outage(http: aiohttp.ClientSession, url: str, redis: RedisServer, engines: int) -> str:
    """Kill Redis, start it empty after three seconds; the engines of the router then."""
    redis.kill()
    least, begun, back = engines, time.monotonic(), False
    while (passed_s := time.monotonic() - begun) < 12.0:
        if not back and passed_s > 3.0:
            redis.start()
            back = True
        async with http.get(f"{url}/workers") as answer:
            workers = (await answer.json())["workers"]
        least = min(least, sum(worker["status"] == "up" for worker in workers))
        await asyncio.sleep(0.05)
    return f"Redis killed for 3 s and started empty: never fewer than {least} of {engines} engines"


async def _main(kinds: list[str], rounds: int) -> list[Figures]:
    found = []
    for kind in kinds:
        if kind == "redis" and shutil.which("redis-server") is None:
            print("redis was left out: there is no redis-server", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            found.append(await measure(kind, rounds, Path(folder)))
    return found


def main() -> int:
    """Print the table; exit status 1 if a request failed."""
    parser = parser_of("benchmarks.discovery", __doc__)
    parser.add_argument("kinds", nargs="*", default=[], metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args()
    found = asyncio.run(_main(given.kinds or list(KINDS), given.rounds))
    print("| source | added s, median | most | drained s, median | most | answered | failed |")
    print("|---|---|---|---|---|---|---|")
    for figures in found:
        print(figures.row(), *([figures.note] if figures.note else []), sep="\n")
    if given.json:
        Path(given.json).write_text(json.dumps([asdict(figures) for figures in found], indent=1))
    return 1 if any(figures.failed for figures in found) else 0


if __name__ == "__main__":
    sys.exit(main())
