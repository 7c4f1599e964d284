"""What must be back at its first value when a drill has ended, as the processes tell it."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import monotonic

import aiohttp
from tests.chaos.judge import Leak

from kvrouter.tools.demo.children import Child

SETTLE_S = 15.0
"""For connections and tasks to end after the last request; those to engines are kept for 4 s."""
HELD = ("leases", "leased_blocks", "pinned_blocks", "waits", "reserved_blocks", "fenced_blocks")
ROUTER_GAUGES = (
    "kvrouter:num_requests_running",
    "kvrouter:num_requests_waiting",
    "kvrouter:recompute_tokens",
    "kvrouter:worker_requests",
    "kvrouter:worker_tokens",
)


async def store_gauges(
    http: aiohttp.ClientSession, url: str, name: str = "store"
) -> dict[str, float]:
    """What a node of the store holds for clients."""
    async with http.get(f"{url}/stats") as answer:
        stats = await answer.json()
    return {f"{name} {gauge}": float(stats[gauge]) for gauge in HELD}


async def router_gauges(http: aiohttp.ClientSession, router: Child) -> dict[str, float]:
    """The router's requests in flight, its tasks, and its sockets."""
    page = await metrics_page(http, router.http)
    gauges = {name: total(page, name) for name in (*ROUTER_GAUGES, "kvrouter:tasks")}
    return {**gauges, "router sockets": float(len(sockets_of(router.pid)))}


async def engine_gauges(http: aiohttp.ClientSession, name: str, url: str) -> dict[str, float]:
    """The requests and slots of an engine."""
    page = await metrics_page(http, url)
    return {
        f"{name} running": total(page, "vllm:num_requests_running"),
        f"{name} waiting": total(page, "vllm:num_requests_waiting"),
        f"{name} cache in use": total(page, "vllm:kv_cache_usage_perc"),
    }


async def settled(
    read: Callable[[], Awaitable[dict[str, float]]], before: dict[str, float]
) -> list[Leak]:
    """The gauges when all are back at their first values, or after a time-out."""
    end_s = monotonic() + SETTLE_S
    while True:
        leaks = [Leak(name, before.get(name, 0.0), now) for name, now in (await read()).items()]
        if not any(leak.leaked for leak in leaks) or monotonic() > end_s:
            return leaks
        await asyncio.sleep(0.2)


async def metrics_page(http: aiohttp.ClientSession, url: str) -> str:
    """What a process shows to Prometheus."""
    async with http.get(f"{url}/metrics") as answer:
        return await answer.text()


def total(page: str, name: str, label: str = "") -> float:
    """The sum over all series of one metric, or over those that have a label as this text."""
    found = re.findall(rf"^{re.escape(name)}(\{{.*\}})? (\S+)$", page, re.MULTILINE)
    return sum(float(value) for labels, value in found if label in labels)


def sockets_of(pid: int) -> list[str]:
    """Every socket of a process, TCP ones by their ends and state."""
    fds = (_target(fd) for fd in Path(f"/proc/{pid}/fd").iterdir())
    known = _tcp_sockets(pid)
    return [known.get(fd[8:-1], "no TCP") for fd in fds if fd.startswith("socket:[")]


def _tcp_sockets(pid: int) -> dict[str, str]:
    """Ends (hexadecimal, as in the kernel) and state of each TCP socket, by inode."""
    rows = [row.split() for row in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    ports = {row[9]: [int(end.rpartition(":")[2], 16) for end in row[1:3]] for row in rows}
    return {row[9]: f"{ports[row[9]][0]}-{ports[row[9]][1]} state {row[3]}" for row in rows}


def _target(fd: Path) -> str:
    try:
        return str(fd.readlink())
    except OSError:
        return ""
