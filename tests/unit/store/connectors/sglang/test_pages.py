"""Where SGLang's pages are: pieces at equal distances, in the order that SGLang names them."""

import ctypes
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.sglang import HostPool, content_of

from kvrouter_store.connectors.sglang.pages import PoolMemory, pages_at
from kvrouter_store.connectors.sglang.shelf import name_of, names_of
from kvrouter_store.identity.blob import blob_name
from kvrouter_store.rdma.memory import spans_of

KEYS = [f"{k:064x}" for k in range(1, 6)]
SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_a_page_is_its_pieces_in_order_in_every_layout(layout: str) -> None:
    pool = HostPool(layout)
    indices = pool.take(5)
    pool.fill(KEYS, indices)
    page_bytes = pool.get_dummy_flat_data_page().numel() * 2
    pages = pages_at(*pool.get_page_buffer_meta(indices), 5, page_bytes)
    found = [
        b"".join(ctypes.string_at(address, size) for address, size in runs)
        for runs in pages.segments.pieces(pages.indices)
    ]
    assert found == [content_of(key, page_bytes) for key in KEYS]


@given(sizes=SIZES, starts=st.lists(st.integers(1, 1 << 40), min_size=1, max_size=6))
def test_pages_may_lie_in_any_order(sizes: list[int], starts: list[int]) -> None:
    distances = [7 * k for k in range(len(sizes))]
    addresses = [start + distance for start in starts for distance in distances]
    pages = pages_at(addresses, sizes * len(starts), len(starts), sum(sizes))
    at = [base + pages.indices[-1] for base in pages.segments.bases]
    assert at == addresses[-len(sizes) :]
    assert pages.segments.block_bytes == sum(sizes)
    assert min(pages.indices) == 0


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda: pages_at([64, 96, 128], [8, 8, 8], 2, 16), "2 pages of 3 addresses"),
        (lambda: pages_at([64, 96], [8], 1, 16), "2 addresses and 1 sizes"),
        (lambda: pages_at([], [], 1, 16), "1 pages of 0 addresses"),
        (lambda: pages_at([64, 96], [8, 8], 1, 32), "16 bytes, not of 32"),
        (lambda: pages_at([64, 96, 128, 168], [8] * 4, 2, 16), "page 1 lies otherwise"),
        (lambda: pages_at([64, 96, 128, 160], [8, 8, 4, 12], 2, 16), "page 1 lies otherwise"),
    ],
)
def test_pages_that_do_not_lie_alike_are_refused(wrong: Callable[[], object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        wrong()


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_all_pages_of_a_pool_are_of_the_same_segments_which_are_the_pool(layout: str) -> None:
    pool = HostPool(layout)
    memory, page_bytes = PoolMemory.of(pool), pool.get_dummy_flat_data_page().numel() * 2
    segments = set()
    for count in (3, 60, 1):
        pieces = pool.get_page_buffer_meta(pool.take(count))
        pages = memory.pages_at(*pieces, count, page_bytes)
        found = [piece for page in pages.segments.pieces(pages.indices) for piece in page]
        assert found == list(zip(*pieces, strict=True))
        segments.add(pages.segments)
    (whole,) = segments
    assert whole.blocks is not None
    start = ctypes.addressof(ctypes.c_char.from_buffer(pool.memory))
    assert spans_of(whole, whole.blocks) == [(start, start + len(pool.memory))]


def test_pages_outside_of_the_memory_that_the_pool_tells_of_have_segments_of_their_own() -> None:
    memory = PoolMemory(1000, 100)
    inside, same, before, beyond, apart = (
        memory.pages_at(addresses, [10, 10], 1, 20).segments
        for addresses in ([1000, 1050], [1040, 1090], [999, 1049], [1041, 1091], [1050, 1000])
    )
    assert same is inside
    assert [one.blocks for one in (inside, before, beyond, apart)] == [41, None, None, None]


def test_a_pool_that_is_not_one_tensor_is_used_as_it_is() -> None:
    pool = HostPool()
    pool.kv_buffer = None
    pieces = pool.get_page_buffer_meta(pool.take(2))
    page_bytes = pool.get_dummy_flat_data_page().numel() * 2
    assert PoolMemory.of(pool).pages_at(*pieces, 2, page_bytes).segments.blocks is None


def test_a_key_of_sglang_is_the_name_of_its_block() -> None:
    key = "0123456789abcdef" * 4
    assert name_of(key) == bytes.fromhex(key)
    assert names_of([key, KEYS[1]]) == bytes.fromhex(key + KEYS[1])


@pytest.mark.parametrize("key", ["page 1", "ab" * 31, "AB" * 32, f"{'ab' * 32}\n", ""])
def test_any_other_key_has_a_name_too(key: str) -> None:
    assert name_of(key) == blob_name(key)
