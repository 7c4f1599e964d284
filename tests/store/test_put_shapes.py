"""A put over a stream goes in pieces: wherever they end, each block is followed by its digest."""

import random
from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.fakes.shapes import Memory
from tests.fakes.store import chain_of, manifest_of

from kvstore._core import BlockStatus, StoreServer
from kvstore.client import StoreClient

PIECE = 128 << 10
"""The most bytes of a piece, where they are digested."""
EDGES = [half * PIECE // 2 + beside for half in range(1, 9) for beside in (-1, 0, 1)]


@pytest.fixture(scope="module")
def client() -> Iterator[StoreClient]:
    """Over TCP to a node of its own, which checks what comes."""
    node = StoreServer(pool_bytes=32 << 20)
    node.start()
    with StoreClient(f"kv://127.0.0.1:{node.port}", transport="tcp") as client:
        yield client
    node.stop()


@settings(max_examples=60, deadline=None)
@given(
    block_bytes=st.sampled_from(EDGES) | st.integers(1, 5 * PIECE),
    blocks=st.integers(1, 6),
    seed=st.integers(0, 2**32),
)
@example(block_bytes=PIECE, blocks=3, seed=1)  # each piece ends with a block
@example(block_bytes=PIECE // 2, blocks=5, seed=1)  # every other block ends a piece
@example(block_bytes=3 * PIECE - 1, blocks=2, seed=1)  # and none does
def test_blocks_of_any_shape_are_stored_with_their_digests(
    client: StoreClient, block_bytes: int, blocks: int, seed: int
) -> None:
    chance = random.Random(seed)
    manifest, hashes, span = manifest_of(block_bytes), chain_of(blocks, str(seed)), range(blocks)
    source, back = (Memory(chance.choice, block_bytes, blocks) for _ in range(2))
    contents = [chance.randbytes(block_bytes) for _ in span]
    for index, content in enumerate(contents):
        source.put(index, content)
    client.delete(manifest, hashes)
    assert client.put(manifest, 0, hashes, span, source.segments, span).stored == blocks
    statuses = client.get_into(manifest, 0, hashes, span, back.segments, span)
    assert statuses == [BlockStatus.OK] * blocks
    expected = bytearray(back.data)
    for index, content in enumerate(contents):
        back.put(index, content, expected)
    assert back.data == expected
