"""In which order blocks are written to tiers."""

from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.store import HASH_BYTES, chain_of

from kvrouter_store.tiers.blocks import Block
from kvrouter_store.tiers.write import parents_first


def blocks_of(seed: str, count: int) -> list[Block]:
    data = chain_of(count, seed)
    hashes = [data[at : at + HASH_BYTES] for at in range(0, len(data), HASH_BYTES)]
    return [Block(each, parent) for each, parent in zip(hashes, [None, *hashes], strict=False)]


@given(st.permutations([*blocks_of("a", 6), *blocks_of("b", 4)]))
def test_blocks_are_written_after_their_parents(blocks: list[Block]) -> None:
    ordered = parents_first(blocks)
    assert set(ordered) == set(blocks)
    assert len(ordered) == len(blocks)
    places = {block.hash: place for place, block in enumerate(ordered)}
    assert all(places[each.parent] < places[each.hash] for each in ordered if each.parent)


def test_a_block_told_twice_is_written_once() -> None:
    blocks = blocks_of("a", 3)
    assert parents_first([*blocks, *blocks]) == blocks


def test_blocks_whose_parents_are_not_new_keep_their_order() -> None:
    blocks = blocks_of("a", 5)
    assert parents_first(blocks[3:]) == blocks[3:]
