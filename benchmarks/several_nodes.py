"""What a match at several store nodes costs the router: `python -m benchmarks.several_nodes`.

Starts real nodes on this machine, which publish what they hold. The first holds all blocks of a
prompt, the others a part. Prints the router's CPU and the time for a match of the prompt, with all
nodes asked and with the index of their events; and how soon the index has a block after its put.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import uvloop
from tests.fakes.mooncake import free_ports
from tests.fakes.store import StoreProcess, chain_of, manifest_of, put_chain

from benchmarks.arguments import parser_of
from kvrouter.engines.engine import CacheGroup
from kvrouter.prefix.stores.node import NodesView
from kvrouter.prefix.stores.node_index import NodeIndex
from kvrouter_store.client.asyncio_client import AsyncStoreClient
from kvrouter_store.client.blocking import StoreClient

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

BLOCKS, PART = 512, 100
MANIFEST = manifest_of(64)
NAME = MANIFEST.digest.hex()
CHAIN = chain_of(BLOCKS)
COUNTS = (1, 2, 4, 8)
PATIENCE_S = 20.0


@dataclass(frozen=True)
class Figures:
    """Of a match: microseconds by number of nodes. Of the index: milliseconds after the put."""

    asked_cpu_us: dict[int, float]
    asked_us: dict[int, float]
    index_cpu_us: dict[int, float]
    index_us: dict[int, float]
    known_after_ms: float
    known_after_most_ms: float


@dataclass
class Nodes:
    """Running nodes: their URLs, and ports of events and replays by `HOST:PORT`."""

    urls: list[str]
    ports: dict[str, int]
    replay_ports: dict[str, int]

    def add(self, stack: ExitStack) -> None:
        """Start one more, with its part of the prompt."""
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        port, replay_port = free_ports(2)
        config = {
            "enable_kv_cache_events": True,
            "endpoint": f"tcp://127.0.0.1:{port}",
            "replay_endpoint": f"tcp://127.0.0.1:{replay_port}",
        }
        flags = ("--kv-events-config", json.dumps(config))
        node = stack.enter_context(StoreProcess(folder, "64MiB", *flags))
        with StoreClient(node.url) as client:
            client.register(MANIFEST)
            put_chain(client, MANIFEST, CHAIN if not self.urls else CHAIN[: 32 * PART])
        self.urls.append(node.url)
        self.ports[node.url.partition("://")[2]] = port
        self.replay_ports[node.url.partition("://")[2]] = replay_port


async def until(true: Callable[[], bool], pause_s: float = 0.0002) -> None:
    """Wait for it; TimeoutError."""
    async with asyncio.timeout(PATIENCE_S):
        while not true():  # noqa: ASYNC110 (no event tells it)
            await asyncio.sleep(pause_s)


async def match_costs(nodes: Nodes, count: int, rounds: int, *, index: bool) -> tuple[float, float]:
    """CPU and time of one match, in microseconds: the best of five runs."""
    made = NodeIndex(100_000, nodes.ports, nodes.replay_ports) if index else None
    view = NodesView(AsyncStoreClient, made)
    view.follow(nodes.urls[:count])
    await view.start(PATIENCE_S)
    groups = [CacheGroup(NAME)]
    if made is not None:
        await until(lambda: _held(made.match(groups, CHAIN)) == [BLOCKS] + [PART] * (count - 1))
    best = []
    for _ in range(5):
        cpu_s, since_s = time.process_time(), time.perf_counter()
        for _ in range(rounds):
            assert (await view.match(NAME, CHAIN)).blocks == BLOCKS
        spent = time.process_time() - cpu_s, time.perf_counter() - since_s
        best.append(tuple(1e6 * each / rounds for each in spent))
    await view.close()
    cpu_us, wall_us = min(best)
    return cpu_us, wall_us


def _held(found: Mapping[str, int]) -> list[int]:
    return sorted(found.values(), reverse=True)


async def known_after(nodes: Nodes, puts: int) -> list[float]:
    """Milliseconds from the end of a put until the index has its block."""
    index, url = NodeIndex(100_000, nodes.ports, nodes.replay_ports), nodes.urls[0]
    index.follow([url])
    groups = [CacheGroup(NAME)]
    await until(lambda: index.match(groups, CHAIN).get(url) == BLOCKS)
    took = []
    with StoreClient(url) as client:
        for number in range(puts):
            block = chain_of(1, f"new {number}")
            await asyncio.to_thread(put_chain, client, MANIFEST, block)
            since_s = time.perf_counter()
            await until(lambda block=block: index.match(groups, block)[url] == 1)  # type: ignore[misc]
            took.append(1e3 * (time.perf_counter() - since_s))
            await asyncio.sleep(0.02)
    index.close()
    return took


def measure(rounds: int, puts: int) -> Figures:
    """All figures."""
    found: dict[bool, dict[int, tuple[float, float]]] = {False: {}, True: {}}
    nodes = Nodes([], {}, {})
    with ExitStack() as stack:
        for count in COUNTS:
            while len(nodes.urls) < count:
                nodes.add(stack)
            for index in (False, True):
                costs = match_costs(nodes, count, rounds, index=index)
                found[index][count] = uvloop.run(costs)
        took = uvloop.run(known_after(nodes, puts))
    cpu = [{n: round(c, 1) for n, (c, _) in found[index].items()} for index in (False, True)]
    wall = [{n: round(w, 1) for n, (_, w) in found[index].items()} for index in (False, True)]
    return Figures(cpu[0], wall[0], cpu[1], wall[1], round(median(took), 1), round(max(took), 1))


def main() -> int:
    """Run it and print the figures."""
    parser = parser_of("benchmarks.several_nodes", __doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    args = parser.parse_args()
    figures = asdict(measure(*((50, 5) if args.quick else (500, 50))))
    for name, value in figures.items():
        print(f"{name:20} {value}")
    if args.json:
        args.json.write_text(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
