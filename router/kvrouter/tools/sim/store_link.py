"""A simulated engine's connection to the KV store. It works in threads.

If an operation of the store fails, the engine computes. Wrong bytes are counted, deleted from the
store, and computed again.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from random import Random
from typing import TYPE_CHECKING, TypeVar

from kvrouter_store._core import BlockStatus
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.connectors.neighbours import Neighbours, name_of
from kvrouter_store.errors import KVStoreError
from kvrouter_store.identity.chain import BlockHashes
from kvrouter_store.rdma.initiator import Initiator

if TYPE_CHECKING:
    from kvrouter.tools.sim.engine import SimEngine

Result = TypeVar("Result")
_KEPT = (BlockStatus.STORED, BlockStatus.EXISTS, BlockStatus.BUSY)

log = logging.getLogger(__name__)


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


class SimStoreLink:
    """The link of an engine, called `name`, to the store. `close` after the last request.

    Where it takes a `node`, that is the URL of another node of the store; "" is the own one.
    """

    def __init__(self, engine: "SimEngine", url: str, name: str) -> None:
        self.node = name_of(url)  # of the own node, for others; "": none
        self._engine = engine
        self._name = name
        self._client = self._open(url)
        self._neighbours = Neighbours(self._open, StoreClient.close)
        self._random = Random(engine.settings.seed)
        self._registered = False

    def _open(self, url: str) -> StoreClient:
        settings = self._engine.settings
        return StoreClient(
            url,
            transport=settings.store_transport,
            rdma=Initiator(settings.rdma_options),
            deadline_s=settings.store_deadline,
            name=self._name,
            token=settings.store_token.get_secret_value(),
            tls=settings.store_tls,
        )

    async def register(self) -> None:
        """Register the engine. If the store is away, the next operation does it."""
        await self._guarded(lambda client: None, None)
        if not self._registered:
            log.warning(
                "the store %s does not answer: %s computes all", self._client.url, self._name
            )

    async def match(self, hashes: BlockHashes, node: str = "") -> int:
        """How many leading blocks the store has; 0 if it is away."""
        manifest = self._engine.manifest
        return await self._guarded(lambda c: c.match(manifest, hashes.data).blocks, 0, node)

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
        engine, span = self._engine, range(first, first + len(slots))
        memory, manifest = engine.memory, engine.manifest

        def take(client: StoreClient) -> int:
            names = hashes[: span.stop].data
            statuses = client.get_into(manifest, 0, names, span, memory.segments, slots)
            came = _leading(statuses, (BlockStatus.OK,))
            engine.metrics.lost_blocks.inc(len(slots) - came)
            if came and self._random.random() * 100 < engine.settings.kv_corruption_rate:
                memory.slot(slots[0])[0] ^= 0xFF
            if not engine.settings.verify_kv:
                return came
            right = memory.right_blocks(slots[:came], list(contents[first : first + came]))
            if right < came:
                engine.metrics.wrong_blocks.inc()
                client.delete(manifest, hashes[first + right])
            return right

        return await self._guarded(take, 0, node)

    async def save(self, hashes: BlockHashes, first: int, slots: list[int]) -> int:
        """Put the blocks in `slots` into the store; how many leading ones it has or receives."""
        engine, span = self._engine, range(first, first + len(slots))

        def put(client: StoreClient) -> int:
            names, segments = hashes[: span.stop].data, engine.memory.segments
            result = client.put(engine.manifest, 0, names, span, segments, slots)
            engine.metrics.saved_blocks.inc(result.stored)
            return _leading(result.statuses, _KEPT)

        return await self._guarded(put, 0)

    async def close(self) -> None:
        """Close the connections."""
        await in_thread(self._engine.executor, self._client.close)
        await in_thread(self._engine.executor, self._neighbours.close)

    async def _guarded(
        self, work: Callable[[StoreClient], Result], default: Result, node: str = ""
    ) -> Result:
        engine = self._engine

        def registered() -> Result:
            if not self._registered:
                self._client.register(engine.manifest, engine=self._name)
                self._registered = True
            with self._neighbours.client(node) if node else nullcontext(self._client) as client:
                return work(client)

        try:
            return await in_thread(engine.executor, registered)
        except KVStoreError:
            engine.metrics.store_errors.inc()
            return default
        finally:
            engine.metrics.use_transport(self._client.transport)


def _leading(statuses: Sequence[BlockStatus], good: Sequence[BlockStatus]) -> int:
    """How many leading ones are good."""
    return next((at for at, one in enumerate(statuses) if one not in good), len(statuses))
