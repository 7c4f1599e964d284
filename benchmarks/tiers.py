"""Throughput through the tier of a node, beside the tier's own client library alone; then hits.

    python -m benchmarks.tiers [--quick] [--json FILE] [--tiers NAME...]

Put: an engine's client writes blocks to a node until its tier has all of them. Get: an engine's
client reads them from a second, empty node, which has them from the tier. Alone: the library stores
and loads values of the same size in batches of the same size, from and to its own memory (redis-py
with hiredis in pipelines, on uvloop, its fastest way; Mooncake's batch calls on registered memory).
Both are done in pairs, A B B A; each pair has a ratio, and the median is to be 0.8. All processes
are on this machine: only ratios can be compared. Then: when KV has landed, and what a hit costs,
from the local node, a neighbour and each tier (benchmarks/tiers_hits.py). Mooncake needs
KVROUTER_MOONCAKE, which `benchmarks/connectors/make_peer.sh mooncake python` prints, and its lib in
LD_LIBRARY_PATH.
"""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import uvloop
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from tests.fakes.store import Memory

from benchmarks import tiers_hits
from benchmarks.arguments import parser_of, write_figures
from benchmarks.tiers_hits import LOCAL, NEIGHBOUR, source_of
from benchmarks.tiers_rig import KINDS, MIB, TIER_MEMORY, Blocks, Node, read, serving, write
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.tiers.base import Item, Tier, TierStatus
from kvrouter_store.tiers.registry import tier_of
from kvrouter_store.tiers.staging import Staging

SIZES = {"64 KiB": 64 << 10, "1 MiB": MIB}
PAIRS = 5
HEADS = ("Tier", "block", "", "through a node", "client alone", "ratio (range)")
LOOK_S = 0.005
"""Between two looks whether the last block is in the tier: each takes time from those measured."""


class RedisAlone:
    """redis-py, of one server or a cluster: a pipeline for each batch."""

    def __init__(self, url: str, size: int, count: int) -> None:
        kind: Any = RedisCluster if "+cluster" in url else Redis
        self._client = kind.from_url(url.replace("+cluster", "").partition(",")[0], protocol=2)
        self._values = [os.urandom(size) for _ in range(count)]

    async def store(self, keys: Sequence[str], first: int) -> None:
        """SET each."""
        values = self._values[first : first + len(keys)]
        await self._all([("SET", *pair) for pair in zip(keys, values, strict=True)])

    async def load(self, keys: Sequence[str], first: int) -> None:
        """GET each."""
        values = await self._all([("GET", key) for key in keys])
        if values[-1] != self._values[first + len(keys) - 1]:
            raise RuntimeError("Redis alone did not return what it got")

    async def _all(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        return list(await pipeline.execute())


class MooncakeAlone:
    """Mooncake's client in this process: a batch call in a thread."""

    def __init__(self, tier: Tier, size: int, stride: int, slots: int) -> None:
        self._tier, self._size, self._stride, self._slots = tier, size, stride, slots

    async def store(self, keys: Sequence[str], first: int) -> None:
        """By batch_put_from."""
        self._check(await self._tier.store(self._items(keys, first)))

    async def load(self, keys: Sequence[str], first: int) -> None:
        """By batch_get_into."""
        self._check(await self._tier.load(self._items(keys, first)))

    def _items(self, keys: Sequence[str], first: int) -> list[Item]:
        slots = [(first + k) % self._slots for k in range(len(keys))]
        return [
            Item(key, slot * self._stride, self._size)
            for key, slot in zip(keys, slots, strict=True)
        ]

    def _check(self, statuses: Sequence[TierStatus]) -> None:
        if set(statuses) != {TierStatus.OK}:
            raise RuntimeError(f"Mooncake alone failed: {set(statuses)}")


@dataclass
class Row:
    """One operation: GiB/s of each pair."""

    tier: str
    size: str
    operation: str
    through: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        ratios = [mine / other for mine, other in zip(self.through, self.alone, strict=True)]
        return (
            f"| {self.tier} | {self.size} | {self.operation} | {median(self.through):.2f} GiB/s "
            f"| {median(self.alone):.2f} GiB/s "
            f"| **{median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f}) |"
        )


class Pairs:
    """Measures one tier with blocks of one size. `nodes`: clients of two nodes over it."""

    def __init__(self, blocks: Blocks, url: str, nodes: Sequence[StoreClient]) -> None:
        self._blocks = blocks
        self._writer, self._reader = nodes
        self._into = Memory(blocks.count, blocks.memory.block_bytes)
        self._tier = tier_of(url)
        staging, stride = Staging(TIER_MEMORY), blocks.values.block_bytes
        size = blocks.values.items(0, [bytes(32)])[0].size
        self._memory = staging.memory
        self._batch = staging.chunk_bytes // stride
        self._alone = (
            RedisAlone(url, size, blocks.count)
            if "redis" in url
            else MooncakeAlone(self._tier, size, stride, TIER_MEMORY // stride)
        )

    async def measure(self, rows: tuple[Row, Row], pairs: int) -> None:
        """Fill the rows of put and get."""
        await self._tier.start(self._memory)
        for turn in range(-1, pairs):  # the first is not counted
            if turn % 2:
                alone_s = await self._by_itself()
            through_s = await self._through()
            if turn % 2 == 0:
                alone_s = await self._by_itself()
            for row, one_s, other_s in zip(rows, through_s, alone_s, strict=True):
                if turn >= 0:
                    row.through.append(self._blocks.bytes / one_s / 1024 / MIB)
                    row.alone.append(self._blocks.bytes / other_s / 1024 / MIB)
        await self._tier.stop()

    async def _through(self) -> tuple[float, float]:
        """Seconds of a put until it is in the tier, and of a get out of it."""
        hashes = self._blocks.next()
        keys = self._blocks.keys(hashes)
        begun = time.perf_counter()
        write(self._writer, self._blocks, hashes)
        while True:
            while not all(await self._tier.holds(keys[-1:])):  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
            put_s = time.perf_counter() - begun
            if all(await self._tier.holds(keys)):
                break
        self._writer.purge()
        begun = time.perf_counter()
        read(self._reader, self._blocks, hashes, self._into)
        get_s = time.perf_counter() - begun
        if self._into.data != self._blocks.memory.data:
            raise RuntimeError("blocks came back with other bytes")
        self._reader.purge()
        await self._tier.drop(keys)
        return put_s, get_s

    async def _by_itself(self) -> tuple[float, float]:
        """Seconds in which the client alone stores and loads as much."""
        keys = self._blocks.keys(self._blocks.next())
        times = [time.perf_counter()]
        for call in (self._alone.store, self._alone.load):
            for first in range(0, len(keys), self._batch):
                await call(keys[first : first + self._batch], first)
            times.append(time.perf_counter())
        await self._tier.drop(keys)
        return times[1] - times[0], times[2] - times[1]


def rows_of(kind: str, folder: Path, total: int, pairs: int) -> Iterator[Row]:
    """Measure one tier."""
    for name, size in SIZES.items():
        with ExitStack() as stack:
            here = folder / f"{kind}-{size}".replace(" ", "-")
            here.mkdir()
            url = stack.enter_context(serving(kind, here / "servers"))
            nodes = [
                stack.enter_context(Node(here / each, 2 * total + 64 * MIB, url))
                for each in ("first", "second")
            ]
            clients = [stack.enter_context(node.client()) for node in nodes]
            rows = Row(kind, name, "put"), Row(kind, name, "get")
            uvloop.run(Pairs(Blocks(total // size, size), url, clients).measure(rows, pairs))
            yield from rows


def table(
    heads: Sequence[str], names: Sequence[str], measured: Callable[[str, Path], Iterator[Any]]
) -> list[dict[str, Any]]:
    """Print the rows (dataclasses) of each name in Markdown, measured in a folder of its own."""
    rows = []
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    for name in names:
        try:
            with tempfile.TemporaryDirectory(prefix="kvt-") as folder:
                for row in measured(name, Path(folder)):
                    rows.append(asdict(row))
                    print(row, flush=True)
        except RuntimeError as error:
            print(f"{name} was left out: {error}", file=sys.stderr)
    return rows


def main() -> int:
    """Print both tables."""
    parser = parser_of("benchmarks.tiers", __doc__)
    parser.add_argument("--quick", action="store_true", help="two rounds, of less data")
    parser.add_argument("--tiers", nargs="*", choices=KINDS, default=KINDS)
    options = parser.parse_args()
    total, pairs = (32 * MIB, 2) if options.quick else (128 * MIB, PAIRS)
    rows = table(HEADS, options.tiers, lambda name, at: rows_of(name, at, total, pairs))
    names = (LOCAL, NEIGHBOUR, *options.tiers)
    rows += table(tiers_hits.HEADS, names, lambda name, at: iter([source_of(name, at, pairs)]))
    write_figures(options.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
