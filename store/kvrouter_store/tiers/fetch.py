"""Brings blocks that a node lacks from the tiers into the node, the first tier first."""

import asyncio
import logging
from collections.abc import Sequence

from kvrouter_store.errors import KVStoreError
from kvrouter_store.identity.chain import BlockHashes
from kvrouter_store.tiers.base import TierStatus, complete
from kvrouter_store.tiers.blocks import BlockValues, NodeBlocks
from kvrouter_store.tiers.guard import MOST_KEYS, Guard
from kvrouter_store.tiers.staging import Staging

BATCHES = 2
"""At a time, of a request."""
log = logging.getLogger(__name__)


class Fetcher:
    """Requests that want the same block at the same time share one load. One event loop."""

    def __init__(self, tiers: Sequence[Guard], staging: Staging, node: NodeBlocks) -> None:
        self._tiers = tiers
        self._staging = staging
        self._node = node
        self._loading: dict[bytes, asyncio.Future[bool]] = {}

    async def find(self, values: BlockValues, hashes: Sequence[bytes]) -> int:
        """How many leading ones of these blocks are in tiers."""
        found = 0
        for tier in self._tiers:
            if found < len(hashes):
                found += await _held(tier, values, hashes[found:])
        return found

    async def bring(self, values: BlockValues, chain: BlockHashes, places: Sequence[int]) -> int:
        """Load the blocks at ascending places of a chain; how many leading ones the node has now.

        While one batch is put into the node, the next comes from the tier.
        """
        there, step = 0, self._staging.chunk_bytes // values.block_bytes
        turns = asyncio.Semaphore(BATCHES)

        async def load(tier: Guard, batch: Sequence[int]) -> int:
            async with turns:
                return await self._load(tier, values, chain, batch)

        for tier in self._tiers:
            if there < len(places):
                held = await _held(tier, values, [chain[place] for place in places[there:]])
                wanted = places[there : there + held]
                batches = [wanted[at : at + step] for at in range(0, held, step)]
                for arrived in await asyncio.gather(*(load(tier, batch) for batch in batches)):
                    there += arrived
                    if arrived < step:
                        break
        return there

    async def _load(
        self, tier: Guard, values: BlockValues, chain: BlockHashes, places: Sequence[int]
    ) -> int:
        """Load what no other request is loading, and wait for the rest."""
        names = [values.names(chain[place])[0] for place in places]  # of whole blocks
        fresh = []
        for k, name in enumerate(names):
            if name not in self._loading:  # nor earlier in this request
                self._loading[name] = asyncio.get_running_loop().create_future()
                fresh.append(k)
        arrivals = [self._loading[name] for name in names]
        there = 0
        try:
            if fresh:
                there = await self._through_staging(tier, values, chain, [places[k] for k in fresh])
        except KVStoreError as error:
            log.warning("blocks from %s cannot be put into the node: %s", tier.name, error)
        finally:
            for nth, k in enumerate(fresh):
                self._loading.pop(names[k]).set_result(nth < there)
        for blocks, arrival in enumerate(arrivals):
            if not await asyncio.shield(arrival):
                return blocks
        return len(arrivals)

    async def _through_staging(
        self, tier: Guard, values: BlockValues, chain: BlockHashes, places: Sequence[int]
    ) -> int:
        hashes = [chain[place] for place in places]
        memory = self._staging.memory
        async with self._staging.chunk() as at:
            items = values.items(at, hashes)
            statuses = await tier.load(items)
            loaded = values.leading([status is TierStatus.OK for status in statuses])
            intact = values.intact(memory, at, hashes[:loaded])
            whole = values.leading(intact)
            # A request may name the end of a chain alone: its first block still has a parent.
            before = values.parent(memory, at) if whole and places[0] == 0 else None
            names = (before or b"") + chain.data
            whither = [place + (before is not None) for place in places[:whole]]
            there = await complete(
                asyncio.to_thread(self._node.put, values, names, whither, memory.address + at)
            )
        falsified = [item.key for item, good in zip(items, intact, strict=False) if not good]
        pairs = zip(items, statuses, strict=True)
        falsified += [item.key for item, status in pairs if status is TierStatus.FALSIFIED]
        if falsified:
            await tier.drop_falsified(falsified)
        return there


async def _held(tier: Guard, values: BlockValues, hashes: Sequence[bytes]) -> int:
    found, step = 0, max(1, MOST_KEYS // len(values.manifest.parts))
    for at in range(0, len(hashes), step):
        asked = hashes[at : at + step]
        found += values.leading(await tier.holds(values.keys(asked)))
        if found < at + len(asked):
            break
    return found
