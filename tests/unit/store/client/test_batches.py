"""How long puts and gets are cut into requests."""

from kvrouter_store.client.batches import BATCH_BLOCKS, batches


def test_long_spans_are_cut_by_blocks_and_by_bytes() -> None:
    assert list(batches(range(3, 3 + BATCH_BLOCKS + 1), 1)) == [
        range(3, 3 + BATCH_BLOCKS),
        range(3 + BATCH_BLOCKS, 4 + BATCH_BLOCKS),
    ]
    assert list(batches(range(3), 48 << 20)) == [range(1), range(1, 2), range(2, 3)]
