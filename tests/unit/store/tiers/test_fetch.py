"""Blocks come from tiers into the node: whole, in order, and once for all that wait for them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
from tests.fakes.store import put_chain
from tests.unit.store.tiers.test_blocks import BLOCKS, CHAIN, HASHES, MANIFEST, VALUES

from kvrouter_store._core import StoreServer
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.identity.chain import BlockHashes
from kvrouter_store.tiers import fetch, write
from kvrouter_store.tiers.base import Item, Memory, TierStatus
from kvrouter_store.tiers.blocks import NodeBlocks
from kvrouter_store.tiers.fetch import Fetcher
from kvrouter_store.tiers.guard import Guard
from kvrouter_store.tiers.staging import Staging
from kvrouter_store.tiers.write import Writer

NAMES = BlockHashes(CHAIN)


class DictTier:
    """A tier in this process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: dict[str, bytes] = {}
        self.loads = 0
        self.may_drop = True
        self.asked: list[int] = []

    async def start(self, memory: Memory) -> None:
        self._view = memory.view

    async def holds(self, keys: Sequence[str]) -> list[bool]:
        self.asked.append(len(keys))
        await asyncio.sleep(0)
        return [key in self.values for key in keys]

    async def load(self, items: Sequence[Item]) -> list[TierStatus]:
        self.loads += 1
        await asyncio.sleep(0)
        statuses = []
        for item in items:
            value = self.values[item.key]
            fits = len(value) == item.size
            statuses.append(TierStatus.OK if fits else TierStatus.FALSIFIED)
            if fits:
                self._view[item.at : item.at + item.size] = value
        return statuses

    async def store(self, items: Sequence[Item]) -> list[TierStatus]:
        for item in items:
            self.values[item.key] = bytes(self._view[item.at : item.at + item.size])
        return [TierStatus.OK] * len(items)

    async def drop(self, keys: Sequence[str]) -> None:
        for key in keys if self.may_drop else ():
            self.values.pop(key, None)

    async def stop(self) -> None:
        pass


class Side:
    """Two tiers, and what brings blocks from them into a node."""

    def __init__(self, node: NodeBlocks) -> None:
        self.staging = Staging(1 << 20)
        self.tiers = [DictTier("near"), DictTier("far")]
        self.guards = [Guard(tier, self.staging.memory, 5.0) for tier in self.tiers]
        self.fetcher = Fetcher(self.guards, self.staging, node)
        self.writer = Writer(self.guards, self.staging, node)

    def keep(self, tier: int, blocks: slice) -> None:
        """Of what both tiers have, leave these blocks in one."""
        wanted = VALUES.keys(HASHES[blocks])
        values = self.tiers[tier].values
        self.tiers[tier].values = {key: values[key] for key in wanted}


@pytest.fixture
async def side(connect: Callable[..., StoreClient], server: StoreServer) -> AsyncIterator[Side]:
    """Both tiers have the chain, which the node has forgotten."""
    made = Side(NodeBlocks(lambda tenant: connect()))
    keeping = [asyncio.create_task(guard.keep()) for guard in made.guards]
    while not all(guard.up for guard in made.guards):
        await asyncio.sleep(0)
    client = connect()
    for part in range(2):
        put_chain(client, MANIFEST, CHAIN, part)
    await made.writer.write(VALUES, BLOCKS)
    client.purge()
    yield made
    for task in keeping:
        task.cancel()
    await asyncio.wait(keeping)
    made.staging.close()


async def test_blocks_come_back_into_the_node(side: Side, client: StoreClient) -> None:
    assert await side.fetcher.find(VALUES, HASHES) == 6
    assert await side.fetcher.bring(VALUES, NAMES, range(6)) == 6
    assert client.match(MANIFEST, CHAIN).blocks == 6
    assert side.tiers[1].loads == 0


async def test_requests_for_the_same_blocks_share_one_load(side: Side) -> None:
    asks = [side.fetcher.bring(VALUES, NAMES, range(k, 6)) for k in (0, 0, 2)]
    assert await asyncio.gather(*asks) == [6, 6, 4]
    assert side.tiers[0].loads == 1


async def test_a_second_tier_has_what_the_first_lacks(side: Side, client: StoreClient) -> None:
    side.keep(0, slice(0, 2))
    assert await side.fetcher.find(VALUES, HASHES) == 6
    assert await side.fetcher.bring(VALUES, NAMES, range(6)) == 6
    assert client.match(MANIFEST, CHAIN).blocks == 6


async def test_blocks_end_before_one_that_no_tier_has_in_full(
    side: Side, client: StoreClient
) -> None:
    for tier in side.tiers:
        del tier.values[VALUES.keys(HASHES)[5]]
    assert await side.fetcher.find(VALUES, HASHES) == 2
    assert await side.fetcher.bring(VALUES, NAMES, range(6)) == 2
    assert client.match(MANIFEST, CHAIN).blocks == 2


async def test_a_falsified_value_is_dropped_and_taken_from_the_next_tier(
    side: Side, client: StoreClient
) -> None:
    key = VALUES.keys(HASHES)[6]
    value = bytearray(side.tiers[0].values[key])
    value[200] ^= 1
    side.tiers[0].values[key] = bytes(value)
    assert await side.fetcher.bring(VALUES, NAMES, range(6)) == 6
    assert client.match(MANIFEST, CHAIN).blocks == 6
    assert key not in side.tiers[0].values
    assert side.guards[0].values["load", "falsified"] == 1


@pytest.mark.parametrize("kept", [False, True], ids=["dropped", "it may not be dropped"])
async def test_a_value_of_another_size_is_fetched_once(
    side: Side, client: StoreClient, kept: bool
) -> None:
    near, guard = side.tiers[0], side.guards[0]
    key = VALUES.keys(HASHES)[6]  # of the fourth block
    near.values[key] += b"more"
    side.tiers[1].values.clear()
    near.may_drop = not kept
    assert await side.fetcher.bring(VALUES, NAMES, range(6)) == 3
    assert (guard.values["load", "falsified"], key in near.values) == (1, kept)
    client.purge()
    assert await side.fetcher.bring(VALUES, NAMES, range(6)) == 3
    assert guard.values["load", "falsified"] == 1
    for part in range(2):
        put_chain(client, MANIFEST, CHAIN, part)
    await side.writer.write(VALUES, BLOCKS)
    client.purge()
    assert await side.fetcher.bring(VALUES, NAMES, range(6)) == 6


async def test_the_end_of_a_chain_comes_with_its_parent(side: Side, client: StoreClient) -> None:
    end = BlockHashes(CHAIN[32 * 4 :])
    assert await side.fetcher.bring(VALUES, end, [0, 1]) == 2
    assert await side.fetcher.bring(VALUES, NAMES, range(4)) == 4
    assert client.match(MANIFEST, CHAIN).blocks == 6


async def test_what_all_tiers_have_is_not_read_from_the_node(side: Side) -> None:
    stored = [guard.values["store", "ok"] for guard in side.guards]
    await side.writer.write(VALUES, BLOCKS)  # the node has none of them any more
    assert [guard.values["store", "ok"] for guard in side.guards] == stored == [12, 12]


async def test_a_block_that_a_request_names_twice_leaves_nobody_waiting(side: Side) -> None:
    twice = BlockHashes(HASHES[0] + HASHES[0] + HASHES[1])
    async with asyncio.timeout(10):
        assert await side.fetcher.bring(VALUES, twice, range(3)) == 3
        assert await side.fetcher.bring(VALUES, NAMES, range(6)) == 6


async def test_a_long_question_is_cut_and_ends_with_the_cut_that_is_not_whole(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "MOST_KEYS", 4)  # of two blocks
    side.keep(0, slice(0, 3))
    near, far = side.tiers
    near.asked, far.asked = [], []
    assert await side.fetcher.find(VALUES, HASHES) == 6
    assert (near.asked, far.asked) == ([4, 4], [4, 2])
    near.values.clear()
    far.values.clear()
    assert await side.fetcher.find(VALUES, HASHES) == 0
    assert (near.asked, far.asked) == ([4, 4, 4], [4, 2, 4])


async def test_what_a_tier_lacks_is_asked_for_in_cuts_to_the_end(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "MOST_KEYS", 5)
    tier = side.tiers[0]
    tier.asked, stored = [], side.guards[0].values["store", "ok"]
    await side.writer.write(VALUES, BLOCKS)
    assert tier.asked == [5, 5, 2]
    assert side.guards[0].values["store", "ok"] == stored
