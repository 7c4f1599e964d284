"""A put over a stream goes in pieces: wherever they end, each block is followed by its digest."""

import ctypes
import itertools
import random
from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.fakes.store import chain_of, manifest_of

from kvrouter_store._core import BlockStatus, Segments, StoreServer
from kvrouter_store.client.blocking import StoreClient

PIECE = 128 << 10
"""The most bytes of a piece, where they are digested."""
EDGES = [half * PIECE // 2 + beside for half in range(1, 9) for beside in (-1, 0, 1)]


class Memory:
    """Blocks in memory, each in several pieces that lie apart; 0xAA wherever nothing was put."""

    def __init__(self, chance: random.Random, block_bytes: int, blocks: int) -> None:
        cuts = {chance.randint(0, block_bytes) for _ in range(chance.choice((0, 0, 1, 3)))}
        bounds = sorted({0, block_bytes} | cuts)
        sizes = [end - first for first, end in itertools.pairwise(bounds)]
        strides = [size + chance.choice((0, 7)) for size in sizes]
        offsets, at = [], 5
        for stride in strides:
            offsets.append(at)
            at += stride * blocks + 5
        self._places = list(zip(offsets, strides, sizes, strict=True))
        self.data = bytearray(b"\xaa") * at
        self._view = (ctypes.c_char * at).from_buffer(self.data)
        base = ctypes.addressof(self._view)
        self.segments = Segments(
            [base + offset for offset in offsets], strides, sizes, blocks=blocks
        )

    def put(self, index: int, content: bytes, data: bytearray | None = None) -> None:
        """Write a block, here or into a copy of this memory."""
        into = self.data if data is None else data
        first = 0
        for offset, stride, size in self._places:
            at = offset + stride * index
            into[at : at + size] = content[first : first + size]
            first += size


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
    source, back = (Memory(chance, block_bytes, blocks) for _ in range(2))
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
