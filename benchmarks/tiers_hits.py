"""When KV has landed, and what a hit costs: from the local node, a neighbour and each tier.

Landing: from the last put of a chain until the router's client knows that all of it is there. It
waits at the node of the prefill engine, over the node's socket, or over TCP as with a neighbour;
for a tier it asks another node, which has no block, again and again. Load: an engine's client gets
blocks of 1 MiB by shared memory, from the neighbour over TCP; the node over a tier is empty before.
CPU: of the load of 256 blocks, without the servers of the tier. Medians.
"""

import asyncio
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from tests.fakes.store import Memory

from benchmarks.tiers_rig import MIB, Blocks, Node, read, serving, write
from benchmarks.wire_rig import cpu_s
from kvrouter_store.client.asyncio_client import AsyncStoreClient

COUNTS = (1, 16, 256)
LOCAL, NEIGHBOUR = "the local node", "a neighbour"
HEADS = (
    *("Blocks from", "landing", *(f"load of {n}" for n in COUNTS)),
    *("CPU of client per GiB", "CPU of node per GiB"),
)
PATIENCE_S = 30.0


@dataclass
class Source:
    """Where blocks come from: milliseconds and CPU seconds, in the order of rounds."""

    name: str
    landing_ms: list[float] = field(default_factory=list)
    load_ms: dict[int, list[float]] = field(default_factory=lambda: {n: [] for n in COUNTS})
    client_s: list[float] = field(default_factory=list)
    node_s: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        loads = {n: median(times) for n, times in self.load_ms.items()}
        cells = [f"{ms:.1f} ms, {n * 1000 / 1024 / ms:.2f} GiB/s" for n, ms in loads.items()]
        gib = len(self.client_s) * COUNTS[-1] / 1024
        cpu = f"{sum(self.client_s) / gib:.2f} s | {sum(self.node_s) / gib:.2f} s"
        return f"| {self.name} | {median(self.landing_ms):.1f} ms | {' | '.join(cells)} | {cpu} |"


async def landing_ms(blocks: Blocks, near: Node, far: Node) -> float:
    """From the last put into one node until the blocks are known at it, or to be at the other."""
    hashes = blocks.next()
    with near.client("auto") as writer:
        write(writer, blocks, hashes[:-32])
        async with AsyncStoreClient(far.url) as router:
            await router.register(blocks.manifest)
            look = waited if near is far else known
            landing = asyncio.create_task(look(router, blocks, hashes))
            await asyncio.sleep(0)
            await router.stats()  # answered when the node has the question before
            begun = time.perf_counter()
            await asyncio.to_thread(write, writer, blocks, hashes, blocks.count - 1)
            await landing
            return (time.perf_counter() - begun) * 1000


async def waited(router: AsyncStoreClient, blocks: Blocks, hashes: bytes) -> None:
    """Until the node says that they have landed."""
    await router.wait(blocks.manifest, hashes, blocks.count, PATIENCE_S)


async def known(router: AsyncStoreClient, blocks: Blocks, hashes: bytes) -> None:
    """Until a match has them all."""
    while (await router.match(blocks.manifest, hashes)).blocks < blocks.count:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def measure(source: Source, near: Node, far: Node, rounds: int) -> None:
    """Fill the figures of a source. Blocks are written to one node and read from the other."""
    for count in COUNTS:
        blocks, into = Blocks(count, MIB), Memory(count, MIB)
        with near.client("auto") as writer, far.client("auto") as reader:
            for turn in range(-1, rounds):  # the first is not counted
                hashes = blocks.next()
                write(writer, blocks, hashes)
                given_up = time.monotonic() + PATIENCE_S
                while reader.match(blocks.manifest, hashes).blocks < count:
                    if time.monotonic() > given_up:
                        raise RuntimeError("blocks do not arrive: the tier may be full")
                node_s, before_s = cpu_s(far.pid), time.process_time()
                begun = time.perf_counter()
                read(reader, blocks, hashes, into)
                seconds = time.perf_counter() - begun
                if turn >= 0:
                    source.load_ms[count].append(seconds * 1000)
                if turn >= 0 and count == COUNTS[-1]:
                    source.client_s.append(time.process_time() - before_s)
                    source.node_s.append(cpu_s(far.pid) - node_s)
                if near is not far:
                    reader.purge()
                writer.purge()
    few = Blocks(4, MIB)
    source.landing_ms += [asyncio.run(landing_ms(few, near, far)) for _ in range(4 * rounds)]


def source_of(name: str, folder: Path, rounds: int) -> Source:
    """The figures of a source."""
    source, memory = Source(name), 2 * COUNTS[-1] * MIB
    with ExitStack() as stack:
        if name in {LOCAL, NEIGHBOUR}:
            alone = () if name == LOCAL else ("--unix-socket", "none")
            node = stack.enter_context(Node(folder / "node", memory, "", *alone))
            measure(source, node, node, rounds)
        else:
            url = stack.enter_context(serving(name, folder / "servers"))
            near = stack.enter_context(Node(folder / "near", memory, url))
            far = stack.enter_context(Node(folder / "far", memory, url))
            measure(source, near, far, rounds)
    return source
