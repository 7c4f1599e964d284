"""Writes blocks that are new in a node to the tiers below it, behind the back of every put."""

import asyncio
import logging
from collections.abc import Iterable, Sequence

from kvrouter_store.errors import KVStoreError
from kvrouter_store.tiers.base import complete
from kvrouter_store.tiers.blocks import Block, BlockValues, NodeBlocks
from kvrouter_store.tiers.guard import MOST_KEYS, Guard
from kvrouter_store.tiers.staging import Staging

BATCHES = 2
"""At a time: while one is stored, the next is read from the node."""
log = logging.getLogger(__name__)


class Writer:
    """Reads each block once from the node, for all tiers that lack it."""

    def __init__(self, tiers: Sequence[Guard], staging: Staging, node: NodeBlocks) -> None:
        self._tiers = tiers
        self._staging = staging
        self._node = node
        self._turns = asyncio.Semaphore(BATCHES)

    async def write(self, values: BlockValues, blocks: Iterable[Block]) -> None:
        """Write the blocks that tiers lack, parents first in a batch. Nothing is tried again."""
        ordered = parents_first(blocks)
        step = self._staging.chunk_bytes // values.block_bytes
        async with asyncio.TaskGroup() as group:
            for at in range(0, len(ordered), step):
                group.create_task(self._try(values, ordered[at : at + step]))

    async def _try(self, values: BlockValues, blocks: Sequence[Block]) -> None:
        async with self._turns:
            try:
                await self._write(values, blocks)
            except KVStoreError as error:
                log.warning("blocks cannot be read for the tiers below: %s", error)

    async def _write(self, values: BlockValues, blocks: Sequence[Block]) -> None:
        lacking = {tier: await _lacking(tier, values, blocks) for tier in self._tiers if tier.up}
        wanted = [each for each in blocks if any(each in some for some in lacking.values())]
        if not wanted:
            return
        memory = self._staging.memory
        async with self._staging.chunk() as at:
            hashes = [block.hash for block in wanted]
            got = await complete(
                asyncio.to_thread(self._node.take, values, hashes, memory.address + at)
            )
            values.seal(memory, at, wanted)
            items = values.items(at, hashes)
            parts = len(items) // len(wanted)
            for tier, some in lacking.items():
                chosen = [
                    item
                    for k, (each, good) in enumerate(zip(wanted, got, strict=True))
                    if good and each in some
                    for item in items[k * parts : (k + 1) * parts]
                ]
                if chosen:
                    await tier.store(chosen)


async def _lacking(tier: Guard, values: BlockValues, blocks: Sequence[Block]) -> set[Block]:
    """The blocks of which the tier does not have all values."""
    keys, held = values.keys([block.hash for block in blocks]), list[bool]()
    for at in range(0, len(keys), MOST_KEYS):
        held += await tier.holds(keys[at : at + MOST_KEYS])
    parts = len(held) // len(blocks)
    return {each for k, each in enumerate(blocks) if not all(held[k * parts : (k + 1) * parts])}


def parents_first(blocks: Iterable[Block]) -> list[Block]:
    """The blocks, each once, in their order but after their parents."""
    left = {block.hash: block for block in blocks}
    ordered: list[Block] = []
    for block_hash in list(left):
        line, block = [], left.pop(block_hash, None)
        while block is not None:
            line.append(block)
            block = left.pop(block.parent, None) if block.parent else None
        ordered += reversed(line)
    return ordered
