"""Where the bytes of blocks lie in a caller's memory, and their digests where they lie."""

import ctypes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter_store._core import Segments, crc32c

LAYERS = st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any)


@given(sizes=LAYERS, gap=st.integers(0, 3), blocks=st.integers(1, 5))
def test_the_pieces_of_a_block_are_its_bytes_in_order(
    sizes: list[int], gap: int, blocks: int
) -> None:
    stride = sum(sizes) + gap * len(sizes)
    data = bytearray(k % 251 for k in range(stride * blocks))
    base = ctypes.addressof(ctypes.c_char.from_buffer(data))
    bases = [base + sum(sizes[:k]) + gap * k for k in range(len(sizes))]
    segments = Segments(bases, [stride] * len(sizes), sizes, blocks=blocks)
    indices = list(reversed(range(blocks)))
    for index, runs in zip(indices, segments.pieces(indices), strict=True):
        found = b"".join(ctypes.string_at(address, size) for address, size in runs)
        starts = [index * stride + sum(sizes[:k]) + gap * k for k in range(len(sizes))]
        wanted = b"".join(data[at : at + size] for at, size in zip(starts, sizes, strict=True))
        assert found == wanted
        assert all(size for _, size in runs)
        assert len(runs) == (1 if gap == 0 else sum(1 for size in sizes if size))
        assert segments.digests([index]) == [crc32c(wanted)]


def test_an_index_outside_the_memory_is_refused() -> None:
    segments = Segments.over(bytearray(8), 4)
    with pytest.raises(IndexError):
        segments.pieces([2])
    with pytest.raises(IndexError):
        segments.digests([0, 2])


def test_segments_tell_where_they_lie() -> None:
    segments = Segments([64, 4096], [16, 32], [8, 4], blocks=3)
    assert (segments.bases, segments.strides, segments.sizes) == ([64, 4096], [16, 32], [8, 4])
