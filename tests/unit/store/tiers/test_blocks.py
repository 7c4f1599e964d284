"""Blocks enter and leave a node through memory that is not the pool."""

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from tests.fakes.store import HASH_BYTES, Memory, chain_of, content_of, manifest_of, put_chain

from kvrouter_store._core import BlockStatus
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.tiers.blocks import Block, BlockValues, NodeBlocks
from kvrouter_store.tiers.staging import Staging

BLOCK_BYTES = 5000
MANIFEST = manifest_of(BLOCK_BYTES, parts=2)
CHAIN = chain_of(6)
HASHES = [CHAIN[at : at + HASH_BYTES] for at in range(0, len(CHAIN), HASH_BYTES)]
BLOCKS = [Block(each, parent) for each, parent in zip(HASHES, [None, *HASHES], strict=False)]
VALUES = BlockValues("", MANIFEST)


@pytest.fixture
def staging() -> Iterator[Staging]:
    made = Staging(4 << 20)
    yield made
    made.close()


@pytest.fixture
def node(connect: Callable[..., StoreClient]) -> NodeBlocks:
    return NodeBlocks(lambda tenant: connect())


def test_what_a_node_has_becomes_values_that_are_intact(
    node: NodeBlocks, client: StoreClient, staging: Staging
) -> None:
    for part in range(2):
        put_chain(client, MANIFEST, CHAIN, part)
    unknown = chain_of(1, "unknown")
    wanted = [HASHES[4], unknown, HASHES[0], unknown, HASHES[1]]
    assert node.take(VALUES, wanted, staging.memory.address) == [True, False, True, False, True]
    VALUES.seal(staging.memory, 0, [Block(each, None) for each in wanted])
    assert VALUES.intact(staging.memory, 0, wanted) == [True] * 10
    swapped = [wanted[2], *wanted[1:]]
    assert VALUES.intact(staging.memory, 0, swapped)[:3] == [False, False, True]


def test_values_become_blocks_of_the_node(
    node: NodeBlocks, client: StoreClient, staging: Staging
) -> None:
    fill(staging)
    assert node.put(VALUES, CHAIN, range(6), staging.memory.address) == 6
    memory = Memory(6, BLOCK_BYTES)
    statuses = client.get_into(MANIFEST, 1, CHAIN, range(6), memory.segments, range(6))
    assert statuses == [BlockStatus.OK] * 6
    assert memory.data == Memory(6, BLOCK_BYTES).holds(CHAIN).data


def test_blocks_at_any_places_of_a_chain_may_be_put(
    node: NodeBlocks, client: StoreClient, staging: Staging
) -> None:
    fill(staging, [HASHES[1], HASHES[2], HASHES[5]])
    assert node.put(VALUES, CHAIN, [1, 2, 5], staging.memory.address) == 3
    assert client.held(MANIFEST, CHAIN) == [False, True, True, False, False, True]


def test_a_value_names_the_block_before_it(staging: Staging) -> None:
    VALUES.seal(staging.memory, 0, BLOCKS)
    parents = [VALUES.parent(staging.memory, k * VALUES.block_bytes) for k in range(6)]
    assert parents == [None, *HASHES[:5]]


def test_items_are_apart_and_within_the_block() -> None:
    items = VALUES.items(128, HASHES)
    assert [item.key for item in items] == VALUES.keys(HASHES)
    for before, after in pairwise(items):
        assert before.at + before.size <= after.at
    assert items[-1].at + items[-1].size <= 128 + 6 * VALUES.block_bytes


def fill(staging: Staging, hashes: list[bytes] = HASHES) -> None:
    """What belongs to the blocks, where their parts' values lie."""
    for k, block_hash in enumerate(hashes):
        for item in VALUES.items(k * VALUES.block_bytes, [block_hash]):
            end = item.at + item.size
            staging.memory.view[end - BLOCK_BYTES : end] = content_of(block_hash, BLOCK_BYTES)
