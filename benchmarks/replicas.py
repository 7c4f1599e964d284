"""Two routers compared with one, with the same simulated engines and load: balance and delay.

    python -m benchmarks.replicas [--seconds 30] [--load 0.7] [--engines 4]

Real processes: routers, engines that compute one prompt at a time (0.1 ms per token), redis-server.
Requests arrive at random times, the same ones in each run, in turn at each router. Prints the time
to the first byte of the answer, and the imbalance of prompt tokens between the engines.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from tests.fakes.redis import RedisServer

from benchmarks.arguments import parser_of
from kvrouter.tools.demo.children import Child, Children

TOKENS = (500, 1000, 1500, 2000, 2000, 2500, 4500)
SECONDS_PER_TOKEN = 0.0001


@dataclass(frozen=True)
class Run:
    """The routers of one run."""

    name: str
    routers: int
    redis: bool


@dataclass(frozen=True)
class Load:
    """The requests."""

    engines: int
    share: float
    seconds: float

    @property
    def per_second(self) -> float:
        """Requests per second."""
        return self.share * self.engines / (SECONDS_PER_TOKEN * sum(TOKENS) / len(TOKENS))


RUNS = (
    Run("one router", 1, redis=False),
    Run("two routers over Redis", 2, redis=True),
    Run("two routers, each counts its own", 2, redis=False),
)


async def start_engines(children: Children, count: int) -> list[Child]:
    """Start simulated engines that compute one prompt after the other."""
    flags = ("sim", "--port", "0", "--model", "tiny", "--max-num-seqs", "1", "--seed", "1")
    pace = (
        "--prefill-time-per-token",
        f"{SECONDS_PER_TOKEN * 1000}ms",
        "--kv-bytes-per-token",
        "16",
    )
    starts = (children.start(f"engine-{k}", *flags, *pace) for k in range(count))
    return list(await asyncio.gather(*starts))


async def one_request(http: aiohttp.ClientSession, router: str, ids: list[int]) -> float:
    """Seconds to the first byte of the answer."""
    body = {"model": "tiny", "prompt": ids, "max_tokens": 1}
    began = time.perf_counter()
    async with http.post(f"{router}/v1/completions", json=body) as answer:
        took = time.perf_counter() - began
        await answer.read()
        assert answer.status == 200, await answer.text()
    return took


async def drive(routers: list[str], load: Load, seed: int) -> list[float]:
    """Send the load; returns the times to the first byte."""
    chance = random.Random(seed)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http, asyncio.TaskGroup() as group:
        tasks: list[asyncio.Task[float]] = []
        when, begin = 0.0, time.perf_counter()
        while when < load.seconds:
            ids = [chance.randrange(1000, 30_000) for _ in range(chance.choice(TOKENS))]
            await asyncio.sleep(max(0.0, begin + when - time.perf_counter()))
            router = routers[len(tasks) % len(routers)]
            tasks.append(group.create_task(one_request(http, router, ids)))
            when += chance.expovariate(load.per_second)
    return [task.result() for task in tasks]


async def prompt_tokens(engines: list[Child]) -> list[float]:
    """Prompt tokens of each engine so far."""
    found = []
    async with aiohttp.ClientSession() as http:
        for engine in engines:
            async with http.get(f"{engine.http}/metrics") as answer:
                page = await answer.text()
            rows = [r for r in page.splitlines() if r.startswith("vllm:prompt_tokens_total")]
            found.append(sum(float(row.rsplit(" ", 1)[1]) for row in rows))
    return found


async def measure(run: Run, load: Load, folder: Path, stack: ExitStack) -> str:
    """One row of the table."""
    async with AsyncExitStack() as owned:
        children = await owned.enter_async_context(Children(folder))
        engines = await start_engines(children, load.engines)
        shared = ("--redis", stack.enter_context(RedisServer(folder)).url) if run.redis else ()
        flags = ("serve", "--port", "0", "--policy", "least_tokens", "--log-level", "warning")
        named = [each for e in engines for each in ("--decode", e.http)]
        starts = (
            children.start(f"router-{k}", *flags, *named, *shared) for k in range(run.routers)
        )
        routers = list(await asyncio.gather(*starts))
        await drive([r.http for r in routers], Load(load.engines, 0.3, 2.0), seed=1)
        before = await prompt_tokens(engines)
        took = sorted(await drive([r.http for r in routers], load, seed=2))
        legs = [b - a for a, b in zip(before, await prompt_tokens(engines), strict=True)]
    spread = (max(legs) - min(legs)) / (sum(legs) / len(legs))
    mean, p99 = 1000 * sum(took) / len(took), 1000 * took[int(0.99 * len(took))]
    return f"{run.name:36} {len(took):6} {mean:9.0f} {p99:9.0f} {100 * spread:9.1f}"


def main() -> None:
    """Print the table."""
    parser = parser_of("benchmarks.replicas", __doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each run")
    parser.add_argument("--load", type=float, default=0.7, help="share of time engines compute")
    parser.add_argument("--engines", type=int, default=4)
    args = parser.parse_args()
    load = Load(args.engines, args.load, args.seconds)
    print(f"{'':36} {'n':>6} {'TTFT ms':>9} {'p99 ms':>9} {'uneven %':>9}")
    for run in RUNS:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            print(asyncio.run(measure(run, load, Path(folder), stack)), flush=True)


if __name__ == "__main__":
    main()
