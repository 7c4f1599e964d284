"""`make cluster-drill`: several nodes on hosts of their own, over tiers that fail.

Three hosts (network namespaces), each with a node of the store and simulated engines; a router;
Mooncake Store (a master, three storage processes), then Redis, as the tier below the nodes. Under
steady traffic of prompts that share prefixes a node, a host's network, Mooncake's master, one of
its storage processes and Redis go, one after another, and come back.

The last line is the verdict; exit status 0 only if no request failed or hung, no byte was wrong,
all changes were seen in time, and hits came back. 2 where the drill cannot run.
"""

import argparse
import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path
from time import monotonic

import aiohttp
import uvloop
from tests.chaos.gauges import settled
from tests.chaos.hosts.changes import BEFORE_S, LOOK_S, Change, problems, table
from tests.chaos.hosts.fleet import Fleet
from tests.chaos.hosts.hits import HitRates
from tests.chaos.hosts.namespaces import DRILL_FOLDER, Host, Network, NoHosts, own_namespaces
from tests.chaos.judge import Leak, Schedule, Verdict, judge
from tests.chaos.report import left_over, say, say_problems
from tests.chaos.requests import SharedPrefixes
from tests.chaos.traffic import Traffic
from tests.fakes.mooncake import CLIENT_TTL_S
from tests.fakes.redis import MISSING, redis_server

from kvrouter.tools.demo.children import Children
from kvrouter_store.tiers.guard import LONGEST_PAUSE_S

ROOT = Path(__file__).resolve().parents[3]
NEEDS = (
    "needs: network namespaces (Linux, root), iproute2, util-linux, redis-server, 2 processors, "
    "2 GiB of memory and at most 8 minutes; brings Mooncake Store, 100 MB, once"
)
LIMIT_S = 480.0
HOSTS = 3
OUTAGE_S = 6.0
SETTLE_S = 8.0
PATIENCE_S = 20.0
NODE_S = (2.0, 2.0)
TIER_TIMEOUT_S = 1.0  # --tier-timeout
TIER_S = (TIER_TIMEOUT_S + 1, LONGEST_PAUSE_S + 1)
STORAGE_S = (CLIENT_TTL_S + 1, CLIENT_TTL_S + 1)
SAMPLE_S = 0.5
Act = Callable[[], Awaitable[None]]
See = Callable[[], Awaitable[list[bool]]]
Step = tuple[Change, Act, Act, See]
"""What goes, how it goes and comes back, and whether each of the others sees it."""


class ClusterDrill:
    """One run. Times are seconds since the traffic began."""

    def __init__(self, fleet: Fleet, network: Network, traffic: Traffic) -> None:
        self.changes: list[Change] = []
        self.problems: list[str] = []
        self.rates = HitRates()
        self.traffic = traffic
        self._fleet = fleet
        self._network = network

    async def run(self) -> None:
        """All changes, one after the other."""
        await asyncio.sleep(SETTLE_S)
        for step in self._over_mooncake():
            await self._take(*step)
        say(f"{self.traffic.now_s:5.1f} s  nodes restarted one by one, over Redis")
        await self._fleet.move_to_redis()
        await asyncio.sleep(SETTLE_S)
        for step in self._over_redis():
            await self._take(*step)

    async def count_hits(self) -> None:
        """Sample the hit rates until cancelled."""
        while True:
            await self._fleet.count_hits(self.rates)
            self.rates.sample(self.traffic.now_s)
            await asyncio.sleep(SAMPLE_S)

    def _over_mooncake(self) -> list[Step]:
        fleet, network, (_, b, c) = self._fleet, self._network, self._fleet.hosts
        master, storage = fleet.master, fleet.storage[b.name]
        lost = Change("Mooncake's master killed", within_s=TIER_S, tier=True, loses=True)
        return [
            (
                Change(f"node {b.name} killed", within_s=NODE_S),
                lambda: fleet.kill_node(b),
                lambda: fleet.start_node(b),
                lambda: fleet.sees_node(b),
            ),
            (
                # Mooncake forgets the storage process of this host meanwhile.
                Change(f"host {c.name} cut off", within_s=NODE_S),
                in_thread(network.cut, c),
                in_thread(network.join, c),
                lambda: fleet.sees_node(c),
            ),
            (lost, in_thread(master.kill), in_thread(master.start), fleet.sees_tier),
            (
                Change("storage process of Mooncake killed", within_s=STORAGE_S),
                in_thread(storage.kill),
                in_thread(storage.start),
                lambda: fleet.sees_storage(b),
            ),
        ]

    def _over_redis(self) -> list[Step]:
        redis, see = self._fleet.redis, self._fleet.sees_tier
        stalled = Change("Redis stalled", within_s=TIER_S, tier=True)
        killed = Change("Redis killed", within_s=TIER_S, tier=True, loses=True)
        return [
            (stalled, in_thread(redis.stall), in_thread(redis.resume), see),
            (killed, in_thread(redis.kill), in_thread(redis.start), see),
        ]

    async def _take(self, change: Change, go: Act, come: Act, see: See) -> None:
        if not await self._wait(self._fleet.is_well):
            lacking = ", ".join(await self._fleet.lacking()) or "a tier is away"
            self.problems.append(f"before {change.name}: {lacking}")
        self.changes.append(change)
        await asyncio.sleep(BEFORE_S)
        change.at_s = self.traffic.now_s
        say(f"{change.at_s:5.1f} s  {change.name}")
        await go()
        change.gone_s = await self._wait(lambda: nobody(see))
        await asyncio.sleep(change.at_s + OUTAGE_S - self.traffic.now_s)
        await come()
        change.returned_s = self.traffic.now_s
        change.back_s = await self._wait(lambda: everybody(see))
        await asyncio.sleep(SETTLE_S)
        change.until_s = self.traffic.now_s

    async def _wait(self, condition: Callable[[], Awaitable[bool]]) -> float | None:
        """How long it took until it was true; None where it did not become true."""
        begun_s = monotonic()
        while (took_s := monotonic() - begun_s) < PATIENCE_S:
            if await condition():
                return took_s
            await asyncio.sleep(LOOK_S)
        return None


async def nobody(see: See) -> bool:
    """Whether none of the observers sees it."""
    return not any(await see())


async def everybody(see: See) -> bool:
    """Whether each of the observers sees it."""
    return all(await see())


def in_thread(work: Callable[..., None], *arguments: Host) -> Act:
    """What blocks for a moment."""
    return lambda: asyncio.to_thread(work, *arguments)


async def drill(options: argparse.Namespace, folder: Path) -> bool:
    """Run the drill; whether the bars hold."""
    begun_s = monotonic()
    network = Network(HOSTS)
    site = Path(os.environ["KVROUTER_MOONCAKE"])
    once = aiohttp.TCPConnector(force_close=True)  # so that what counts sockets leaves none
    async with Children(folder) as children, aiohttp.ClientSession(connector=once) as http:
        fleet = Fleet(folder, children, http, network.hosts, site)
        try:
            await fleet.start()
            took_s = monotonic() - begun_s
            say(f"started in {took_s:.1f} s: {HOSTS} hosts, a router, Mooncake, Redis")
            before = await fleet.gauges()
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as clients:
                requests = SharedPrefixes(options.seed)
                traffic = Traffic(clients, fleet.router.http, requests, options.seed)
                run = ClusterDrill(fleet, network, traffic)
                await under_traffic(run, options.rate)
            leaks = await settled(fleet.gauges, before)
            wrong_blocks = await fleet.wrong_blocks()
        finally:
            fleet.close()
        verdict = judge(Schedule({}), traffic.asked, leaks)
        verdict.problems += [*run.problems, *problems(run.changes, run.rates)]
        verdict.problems += [f"{n} ended by itself" for n in children.unexpected_deaths()]
        if wrong_blocks:
            verdict.problems.append(f"{wrong_blocks} blocks with wrong bytes")
    report(run, verdict, leaks, wrong_blocks, monotonic() - begun_s)
    return verdict.well


async def under_traffic(run: ClusterDrill, rate: float) -> None:
    """All changes, under steady traffic; returns when the last request has ended."""
    stop = asyncio.Event()
    steady = asyncio.create_task(run.traffic.steady(rate, stop))
    counting = asyncio.create_task(run.count_hits())
    try:
        await run.run()
    finally:
        stop.set()
        counting.cancel()
        await steady


def report(
    run: ClusterDrill, verdict: Verdict, leaks: list[Leak], wrong_blocks: int, took_s: float
) -> None:
    """Print a table, problems and the last line."""
    say("")
    for line in table(run.changes, run.traffic.asked, run.rates):
        say(line)
    say("")
    say_problems(leaks, verdict)
    say(
        f"cluster drill {'passed' if verdict.well else 'FAILED'} in {took_s:.0f} s: "
        f"{verdict.requests} requests and {len(run.changes)} changes; {verdict.failed} failed; "
        f"{verdict.hung} hung; {verdict.wrong} with wrong tokens, {wrong_blocks} blocks with wrong "
        f"bytes; left over: {left_over(leaks)}"
    )


def prepare() -> None:
    """Have the processes find Mooncake's package. Raises NoHosts for what is missing."""
    if shutil.which("ip") is None:
        raise NoHosts("there is no ip (apt-get install iproute2)")
    if redis_server() is None:
        raise NoHosts(MISSING)
    if find_spec("redis") is None:
        raise NoHosts("nodes over Redis need a package: pip install 'redis[hiredis]'")
    command = [str(ROOT / "benchmarks/connectors/make_peer.sh"), "mooncake", sys.executable]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise NoHosts("Mooncake Store cannot be brought here: the lines above say why")
    os.environ["KVROUTER_MOONCAKE"] = site = done.stdout.strip()
    for name, path in (("PYTHONPATH", site), ("LD_LIBRARY_PATH", f"{site}/lib")):
        os.environ[name] = os.pathsep.join(filter(None, [path, os.environ.get(name)]))


async def within_limit(options: argparse.Namespace, folder: Path) -> bool:
    """The drill, which fails if it takes too long."""
    try:
        async with asyncio.timeout(LIMIT_S):
            return await drill(options, folder)
    except TimeoutError:
        say(f"cluster drill FAILED: it took more than {LIMIT_S:g} s")
        return False


def main() -> int:
    """Run it; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.hosts", description=__doc__)
    parser.add_argument("--rate", type=float, default=10, help="requests per second")
    parser.add_argument("--seed", type=int, default=1, help="of prompts and pauses")
    parser.add_argument("--logs", type=Path, help="folder for the logs of all processes")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if not options.inside:
            say(NEEDS)
            own = own_namespaces()
            prepare()
            again = (sys.executable, "-m", "tests.chaos.hosts", *sys.argv[1:], "--inside")
            return subprocess.run([*own, *again], check=False).returncode
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is killed when the one outside ends
        return 0 if uvloop.run(within_limit(options, options.logs or DRILL_FOLDER)) else 1
    except NoHosts as problem:
        say(str(problem))
        return 2
    except KeyboardInterrupt:
        say("cluster drill FAILED: it was stopped")
        return 130


if __name__ == "__main__":
    sys.exit(main())
