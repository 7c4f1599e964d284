"""`make drill`: a minute of steady traffic while every process is killed once.

Prints the faults, the requests in flight during each and their results, and what is left at the
end. The last line is the verdict; exit status 0 only if no request failed without need or hung, no
token was wrong, and nothing leaked.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic

import aiohttp
import uvloop
from tests.chaos.cluster import ROLES, Cluster
from tests.chaos.gauges import settled, sockets_of
from tests.chaos.judge import Fault, Leak, Schedule, Verdict, judge, table
from tests.chaos.report import left_over, say, say_problems
from tests.chaos.requests import MixedRequests
from tests.chaos.traffic import Traffic

from kvrouter.tools.demo.children import Children

STALL_S = 5.0
"""Longer than the router waits for an engine."""
CUT = ("prefill-0", "decode-0")
"""Removed by force under their legs."""
VANISHING = 1000
VANISH_S = 9.0


class Drill:
    """One run. Times are seconds since the traffic began."""

    def __init__(self, cluster: Cluster, traffic: Traffic) -> None:
        self._cluster = cluster
        self._traffic = traffic
        self._resume = asyncio.Event()
        self.schedule = Schedule(ROLES)

    async def faults(self) -> None:
        """All faults, one after the other, in about a minute."""
        cluster = self._cluster
        await self.wait_until(3)
        async with self._fault("prefill killed", down=["prefill-0"]):
            await cluster.kill("prefill-0")
            await asyncio.sleep(3)
            await cluster.restart("prefill-0")
        await self.wait_until(9)
        async with self._fault("decode killed", down=["decode-0"], breaks_streams=True):
            await cluster.kill("decode-0")
            await asyncio.sleep(3)
            await cluster.restart("decode-0")
            await cluster.joined("decode-0")
        await self.wait_until(15)
        async with self._fault("store killed"):
            await cluster.kill_store()
            await asyncio.sleep(3)
            await cluster.start_store()
        await self._links()
        await self.wait_until(41)
        async with self._fault(
            "both decode engines killed", down=["decode-0", "decode-1"], breaks_streams=True
        ):
            await asyncio.gather(cluster.kill("decode-0"), cluster.kill("decode-1"))
            await asyncio.gather(cluster.restart("decode-0"), cluster.restart("decode-1"))
            await asyncio.gather(cluster.joined("decode-0"), cluster.joined("decode-1"))
        await self.wait_until(46)
        await self._clients()

    async def _links(self) -> None:
        """Cut and stall the links to a prefill engine, a decode engine and the store."""
        engines, store = self._cluster.engines, self._cluster.store_link
        for at_s, name in ((20, "prefill-1"), (21.5, "decode-1")):
            await self.wait_until(at_s)
            link = engines[name].link
            assert link is not None
            breaks = name.startswith("decode")
            async with self._fault(f"link of {name} cut", breaks_streams=breaks):
                link.cut()
        await self.wait_until(23)
        async with self._fault("link of the store cut"):
            store.cut()
        for at_s, name in ((24, "prefill-1"), (30, "decode-1")):
            await self.wait_until(at_s)
            link = engines[name].link
            assert link is not None
            breaks = name.startswith("decode")
            async with self._fault(f"link of {name} stalled", down=[name], breaks_streams=breaks):
                link.stall()
                await asyncio.sleep(STALL_S)
                link.resume()
        await self.wait_until(36)
        async with self._fault("link of the store stalled"):
            store.stall()
            await asyncio.sleep(3)
            store.resume()

    async def _clients(self) -> None:
        """Clients that stop reading or vanish, while every engine restarts in turn."""
        cluster, traffic = self._cluster, self._traffic
        async with asyncio.TaskGroup() as group:
            group.create_task(traffic.stop_reading(self._resume))
            async with self._fault(f"{VANISHING} clients vanish"):
                await traffic.vanish(VANISHING, VANISH_S)
            for name in ROLES:
                async with self._fault(f"{name} drained and restarted"):
                    await cluster.roll(name)
            for name in CUT:
                async with self._fault(f"{name} removed by force", breaks_streams=True):
                    await cluster.cut(name)
            self._resume.set()

    async def wait_until(self, at_s: float) -> None:
        """Return at that time, or at once if it has passed."""
        await asyncio.sleep(max(0, at_s - self._traffic.now_s))

    @asynccontextmanager
    async def _fault(
        self, name: str, *, down: list[str] | None = None, breaks_streams: bool = False
    ) -> AsyncIterator[None]:
        """Record the fault that happens within, and its time."""
        roles = {engine: ROLES[engine] for engine in down or []}
        fault = Fault(name, self._traffic.now_s, breaks_streams=breaks_streams, down=roles)
        self.schedule.faults.append(fault)
        say(f"{fault.at_s:5.1f} s  {name}")
        yield
        fault.until_s = self._traffic.now_s


async def drill(options: argparse.Namespace, folder: Path) -> bool:
    """Run the drill; whether the bars hold."""
    begun_s = monotonic()
    once = aiohttp.TCPConnector(force_close=True)  # so that what counts sockets leaves none
    async with Children(folder) as children, aiohttp.ClientSession(connector=once) as http:
        cluster = Cluster(folder, children, http)
        try:
            await cluster.start()
            say(f"started in {monotonic() - begun_s:.1f} s: {', '.join(ROLES)}, a store, a router")
            before = await cluster.gauges()
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as clients:
                requests = MixedRequests(options.seed)
                traffic = Traffic(clients, cluster.router.http, requests, options.seed)
                run = Drill(cluster, traffic)
                stop = asyncio.Event()
                steady = asyncio.create_task(traffic.steady(options.rate, stop))
                await run.faults()
                await run.wait_until(options.seconds)
                stop.set()
                await steady
            leaks = await settled(cluster.gauges, before)
            if any(leak.name == "router sockets" and leak.leaked for leak in leaks):
                open_ones = sockets_of(cluster.router.pid)
                say(f"sockets of the router at {cluster.router.http}: {open_ones}")
        finally:
            cluster.close()
        verdict = judge(run.schedule, traffic.asked, leaks)
        verdict.problems += cluster.unexpected_deaths()
    report(run.schedule, traffic, leaks, verdict, monotonic() - begun_s)
    return verdict.well


def report(
    schedule: Schedule, traffic: Traffic, leaks: list[Leak], verdict: Verdict, took_s: float
) -> None:
    """Print tables, problems and the last line."""
    say("")
    for line in table(schedule, traffic.asked):
        say(line)
    say("")
    say_problems(leaks, verdict)
    say(
        f"drill {'passed' if verdict.well else 'FAILED'} in {took_s:.0f} s: {verdict.requests} "
        f"requests and {traffic.vanished} clients that vanished; {verdict.failed} failed, "
        f"{verdict.excused} of them with an excuse; {verdict.hung} hung; {verdict.wrong} with "
        f"wrong tokens; left over: {left_over(leaks)}"
    )


def main() -> int:
    """Run it; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="of steady traffic, at least")
    parser.add_argument("--rate", type=float, default=12, help="requests per second")
    parser.add_argument("--seed", type=int, default=1, help="of prompts and pauses")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvrouter-drill-") as folder:
        return 0 if uvloop.run(drill(options, Path(folder))) else 1


if __name__ == "__main__":
    sys.exit(main())
