"""A simulated engine's connection to the KV store. It works in threads.

If an operation of the store fails, the engine computes. Wrong bytes are counted, deleted from the
store, and computed again.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TypeVar

from kvrouter.tools.sim.memory import KVMemory
from kvrouter.tools.sim.metrics import SimMetrics
from kvrouter_store._core import BlockStatus
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.connectors.neighbours import Neighbours
from kvrouter_store.errors import KVStoreError
from kvrouter_store.identity.block import CacheSpec, Manifest, Part
from kvrouter_store.identity.chain import BlockHashes
from kvrouter_store.identity.layout import Layout

Result = TypeVar("Result")
_LAYOUT = "kvrouter-sim/1"
_KEPT = (BlockStatus.STORED, BlockStatus.EXISTS, BlockStatus.BUSY)

log = logging.getLogger(__name__)


def sim_manifest(
    model: str, weights_revision: str, block_tokens: int, block_bytes: int, root: bytes
) -> Manifest:
    """The manifest of a simulated engine: one opaque part for each block."""
    spec = CacheSpec(
        model=model,
        weights_revision=weights_revision,
        kv_dtype="sim",
        block_tokens=block_tokens,
        hash_algo="sha256_cbor",
        root=root.hex(),
    )
    part = Part((0, 1), (0, 1), 0, block_bytes, Layout.opaque(_LAYOUT))
    return Manifest(spec, (part,))


async def in_thread(executor: ThreadPoolExecutor, work: Callable[[], Result]) -> Result:
    """Run `work` in a thread; returns only when it has ended, also when cancelled.

    The caller owns the memory that `work` copies from or to. Another request must not get it while
    a thread still copies.
    """
    future = asyncio.get_running_loop().run_in_executor(executor, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError:
                continue
        future.exception()  # retrieved, or asyncio logs it as an unhandled error
        raise


@dataclass(eq=False)
class SimStoreLink:
    """One engine's link to the store. `close` after the last request.

    Where it takes a `node`, that is the URL of another node of the store; "" is the own one.
    """

    client: StoreClient
    neighbours: Neighbours[StoreClient]
    manifest: Manifest
    memory: KVMemory
    metrics: SimMetrics
    executor: ThreadPoolExecutor
    engine: str
    verify: bool
    node: str  # URL of the own node for others; "" if there is none
    spoils: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self._registered = False

    async def register(self) -> None:
        """Register the engine. If the store is away, the next operation does it."""
        await self._guarded(lambda client: None, None)
        if not self._registered:
            log.warning(
                "the store %s does not answer: %s computes all", self.client.url, self.engine
            )

    async def match(self, hashes: BlockHashes, node: str = "") -> int:
        """How many leading blocks the store has; 0 if it is away."""
        return await self._guarded(
            lambda client: client.match(self.manifest, hashes.data).blocks, 0, node
        )

    async def load(
        self,
        hashes: BlockHashes,
        first: int,
        slots: list[int],
        contents: BlockHashes,
        node: str = "",
    ) -> int:
        """Load blocks first, first+1, ... into `slots`; how many leading ones are right.

        `contents` names their right bytes. Without verification all bytes count as right.
        """
        span = range(first, first + len(slots))
        return await self._guarded(
            lambda client: self._load(client, hashes, span, slots, contents), 0, node
        )

    async def save(self, hashes: BlockHashes, first: int, slots: list[int]) -> int:
        """Put the blocks in `slots` into the store; how many leading ones it has or receives."""
        span = range(first, first + len(slots))
        return await self._guarded(lambda client: self._save(hashes, span, slots), 0)

    async def close(self) -> None:
        """Close the connections."""
        await in_thread(self.executor, self.client.close)
        await in_thread(self.executor, self.neighbours.close)

    def _load(
        self,
        client: StoreClient,
        hashes: BlockHashes,
        span: range,
        slots: list[int],
        contents: BlockHashes,
    ) -> int:
        statuses = client.get_into(
            self.manifest, 0, hashes[: span.stop].data, span, self.memory.segments, slots
        )
        came = next(
            (at for at, status in enumerate(statuses) if status is not BlockStatus.OK),
            len(statuses),
        )
        self.metrics.lost_blocks.inc(len(slots) - came)
        if came and self.spoils():
            self.memory.slot(slots[0])[0] ^= 0xFF
        if not self.verify:
            return came
        names = list(hashes[span.start : span.start + came])
        right = self.memory.right_blocks(
            slots[:came], list(contents[span.start : span.start + came])
        )
        if right < came:
            self.metrics.wrong_blocks.inc()
            client.delete(self.manifest, names[right])
        return right

    def _save(self, hashes: BlockHashes, span: range, slots: list[int]) -> int:
        result = self.client.put(
            self.manifest, 0, hashes[: span.stop].data, span, self.memory.segments, slots
        )
        self.metrics.saved_blocks.inc(result.stored)
        statuses = result.statuses
        return next(
            (at for at, status in enumerate(statuses) if status not in _KEPT), len(statuses)
        )

    async def _guarded(
        self, work: Callable[[StoreClient], Result], default: Result, node: str = ""
    ) -> Result:
        def registered() -> Result:
            if not self._registered:
                self.client.register(self.manifest, engine=self.engine)
                self._registered = True
            with self.neighbours.client(node) if node else nullcontext(self.client) as client:
                return work(client)

        try:
            return await in_thread(self.executor, registered)
        except KVStoreError:
            self.metrics.store_errors.inc()
            return default
        finally:
            self.metrics.use_transport(self.client.transport)
