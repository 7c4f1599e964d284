"""SGLang's backend over a real store, with stand-ins for SGLang and its host memory.

`tests/sglang` holds the same to SGLang's own pools and factory.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes.sglang import (
    HostPool,
    Tensor,
    content_of,
    engine_flags,
    sglang_installed,
    storage_config,
)

from kvrouter_store._core import StoreServer
from kvrouter_store.connectors.settings import ConnectorRefused

KEYS = [f"{k:064x}" for k in range(1, 7)]
V1 = {"interface_v1": 1}
Open = Callable[..., Any]


@pytest.fixture
def flags() -> SimpleNamespace:
    """Of the engines, of which each reads them at its start."""
    return engine_flags()


@pytest.fixture
def backend(flags: SimpleNamespace) -> Iterator[type[Any]]:
    with sglang_installed(flags) as found:
        yield found


@pytest.fixture
def start(backend: type[Any], url: str) -> Iterator[Open]:
    """Starts backends, of engines whose host memory is `pool`."""
    started: list[Any] = []

    def start(pool: HostPool, *, extra: Any = V1, **config: Any) -> Any:
        settings = {"url": url, "weights_revision": "r1", **extra}
        one = backend(storage_config(settings, **config), {})
        one.register_mem_pool_host(pool)
        started.append(one)
        return one

    yield start
    for one in started:
        one.close()


def put(one: Any, pool: HostPool, keys: list[str], prefix: list[str] | None = None) -> list[bool]:
    indices = pool.take(len(keys))
    pool.fill(keys, indices)
    put: list[bool] = one.batch_set_v1(keys, indices, SimpleNamespace(prefix_keys=prefix))
    return put


def got(one: Any, pool: HostPool, keys: list[str]) -> list[bool]:
    """Load pages; of each, whether it came. Those that came have the right bytes."""
    indices = pool.take(len(keys))
    came: list[bool] = one.batch_get_v1(keys, indices)
    held = pool.holds(keys, indices)
    assert all(right for right, there in zip(held, came, strict=True) if there)
    return came


@pytest.mark.parametrize("layout", ["page_first", "layer_first", "page_first_direct"])
def test_pages_of_one_engine_come_to_another_as_they_were(layout: str, start: Open) -> None:
    one, other = HostPool(layout), HostPool(layout, pages=32)
    writer, reader = start(one), start(other)
    assert put(writer, one, KEYS[:3]) == [True] * 3
    assert put(writer, one, KEYS[3:5], KEYS[:3]) == [True] * 2
    assert reader.batch_exists(KEYS) == 5
    assert reader.exists(KEYS[4])
    assert not reader.exists(KEYS[5])
    assert got(reader, other, KEYS) == [True] * 5 + [False]


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_pages_that_sglang_passes_as_copies_come_as_they_were(layout: str, start: Open) -> None:
    writer, reader = start(HostPool(layout), extra={}), start(HostPool(layout), extra={})
    page_bytes = len(HostPool(layout).get_dummy_flat_data_page().data)
    pages = [Tensor(content_of(key, page_bytes)) for key in KEYS]
    assert writer.batch_set(KEYS[:4], pages[:4])
    assert writer.set(KEYS[4], Tensor(bytes(pages[4].data), contiguous=False))
    targets = [Tensor(bytes(page_bytes)) for _ in KEYS]
    came = reader.batch_get(KEYS, targets)
    assert came == [*targets[:5], None]
    assert [one.data for one in targets[:5]] == [one.data for one in pages[:5]]
    assert reader.get(KEYS[0]).data == pages[0].data
    assert reader.get(KEYS[1], targets[5]) is targets[5]
    assert targets[5].data == pages[1].data
    assert reader.get(KEYS[5]) is None
    assert not writer.batch_set(KEYS[:1])
    assert not writer.set(KEYS[0])


class OnePiece(HostPool):
    """Pages in one piece, as a copy of them is."""

    def get_page_buffer_meta(self, indices: Sequence[int]) -> tuple[list[int], list[int]]:
        addresses, sizes = super().get_page_buffer_meta(indices)
        return addresses[::2], sizes[::2]

    def get_dummy_flat_data_page(self) -> Tensor:
        return Tensor(bytes(self.layer_num * self.page_size * self.token_bytes))


def test_copies_and_pages_in_place_are_never_mistaken_for_each_other(start: Open) -> None:
    pool = OnePiece()
    in_place, flat = start(pool), start(OnePiece(), extra={})
    assert put(in_place, pool, KEYS) == [True] * 6
    assert start(OnePiece()).batch_exists(KEYS) == 6
    assert flat.batch_exists(KEYS) == 0


@pytest.mark.parametrize(
    ("other", "config", "extra"),
    [
        (HostPool("layer_first"), {}, {}),
        (HostPool(page_size=8, layers=3), {}, {}),
        (HostPool(), {}, {"model": "large"}),
        (HostPool(), {"tp_rank": 1, "tp_size": 2}, {}),
        (HostPool(), {}, {"weights_revision": "r2"}),
    ],
)
def test_engines_that_differ_find_nothing_of_each_other(
    other: HostPool, config: dict[str, Any], extra: dict[str, Any], start: Open
) -> None:
    pool = HostPool()
    assert put(start(pool), pool, KEYS) == [True] * 6
    stranger = start(other, extra=V1 | extra, **config)
    assert stranger.batch_exists(KEYS) == 0
    assert got(stranger, other, KEYS) == [False] * 6


def test_of_the_ranks_of_mla_the_first_stores_what_all_load(start: Open) -> None:
    pools = HostPool(), HostPool()
    first, second = (
        start(pool, is_mla_model=True, tp_rank=rank, tp_size=2) for rank, pool in enumerate(pools)
    )
    assert put(second, pools[1], KEYS) == [True] * 6
    assert second.batch_exists(KEYS) == 0
    assert put(first, pools[0], KEYS) == [True] * 6
    assert got(second, pools[1], KEYS) == [True] * 6


def test_an_engine_goes_on_without_its_store(start: Open, server: StoreServer) -> None:
    pool = HostPool()
    one = start(pool)
    assert put(one, pool, KEYS[:2]) == [True] * 2
    server.stop()
    assert put(one, pool, KEYS[2:]) == [False] * 4
    assert got(one, pool, KEYS[:2]) == [False] * 2
    assert one.batch_exists(KEYS) == 0


def test_after_clear_nothing_that_was_stored_is_loaded_again(start: Open) -> None:
    pool = HostPool()
    one, other = start(pool), start(HostPool())
    put(one, pool, KEYS)
    one.clear()
    assert one.batch_exists(KEYS) == 0
    assert other.batch_exists(KEYS) == 6
    assert put(one, pool, KEYS[:3]) == [True] * 3
    assert one.batch_exists(KEYS) == 3


@pytest.mark.parametrize(("groups", "shared"), [(("", ""), 0), (("a", "b"), 0), (("a", "a"), 3)])
def test_after_clear_only_engines_of_one_update_group_share(
    start: Open, groups: tuple[str, str], shared: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    pool = HostPool()
    one, other = (start(pool, extra={**V1, "update_group": group}) for group in groups)
    assert put(one, pool, KEYS[3:]) == [True] * 3
    assert other.batch_exists(KEYS[3:]) == 3
    one.clear()
    other.clear()
    assert put(one, pool, KEYS[:3]) == [True] * 3
    assert other.batch_exists(KEYS[:3]) == shared
    assert [f"update_group {group!r}" in caplog.text for group in groups] == [True, True]


def test_what_moved_is_counted_for_sglangs_metrics_where_they_are_on(start: Open) -> None:
    pool = HostPool()
    one = start(pool, enable_storage_metrics=True)
    put(one, pool, KEYS)
    got(one, pool, KEYS[:2])
    got(one, pool, ["f" * 64])
    counted = one.get_stats()
    assert (counted.backup_pgs, counted.prefetch_pgs) == ([6], [2])
    assert all(each > 0 for each in counted.backup_bandwidth + counted.prefetch_bandwidth)
    assert len(counted.backup_bandwidth) == len(counted.prefetch_bandwidth) == 1
    assert one.get_stats().backup_pgs == []
    assert start(pool).get_stats() is None


def test_engines_with_another_type_of_kv_find_nothing_of_each_other(
    start: Open, flags: SimpleNamespace
) -> None:
    pool = HostPool()
    put(start(pool), pool, KEYS)
    flags.kv_cache_dtype = "fp8_e5m2"
    assert start(HostPool()).batch_exists(KEYS) == 0


def test_what_cannot_be_is_told_once_and_raises_nothing(
    start: Open, caplog: pytest.LogCaptureFixture
) -> None:
    pool = HostPool()
    one, flat = start(pool), start(pool, extra={})
    with caplog.at_level(logging.ERROR, "sglang.kvstore"):
        for _ in range(2):
            assert one.batch_set_v1(KEYS[:2], pool.take(1)) == [False] * 2
            assert one.batch_get_v1(KEYS[:2], pool.take(1)) == [False] * 2
            assert one.batch_get(KEYS[:1], [Tensor(b"12")]) == [None]
            assert flat.batch_get(KEYS[:1], [Tensor(b"12")]) == [None]
            assert flat.batch_get_v1(KEYS[:1], pool.take(1)) == [False]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 4
    assert "4 indices for 2 pages" in told[0]
    assert 'leave "interface_v1" out' in told[1]
    assert "a page of 2 bytes" in told[2]
    assert 'set "interface_v1": 1' in told[3]
    assert one.batch_set_v1([], []) == one.batch_get_v1([], []) == []
    assert one.batch_exists([]) == 0


def test_before_its_pool_is_known_and_after_close_a_backend_has_nothing(
    backend: type[Any], url: str, start: Open
) -> None:
    early = backend(storage_config({"url": url, "weights_revision": "r1", **V1}), {})
    assert early.batch_exists(KEYS) == 0
    early.clear()
    early.close()
    pool = HostPool()
    one = start(pool)
    put(one, pool, KEYS)
    one.close()
    one.close()
    assert one.batch_exists(KEYS) == 0
    assert put(one, pool, KEYS) == [False] * 6


def test_a_model_with_further_pools_is_refused_at_its_start(start: Open) -> None:
    one = start(HostPool())
    one.register_mem_host_pool_v2(HostPool(), SimpleNamespace(value="kv"))
    with pytest.raises(ConnectorRefused, match="a pool 'mamba' too; leave --hicache-storage"):
        one.register_mem_host_pool_v2(HostPool(), SimpleNamespace(value="mamba"))


def unknown(indices: object) -> None:
    raise NotImplementedError("this layout has no addresses")


@pytest.mark.parametrize("broken", [unknown, lambda indices: ([], [])])
def test_a_pool_that_does_not_say_where_pages_lie_is_refused_at_its_start(
    broken: Callable[[Any], Any], start: Open
) -> None:
    pool = HostPool()
    vars(pool)["get_page_buffer_meta"] = broken
    with pytest.raises(ConnectorRefused, match="cannot take pages of HostPool in the layout page_"):
        start(pool)


def test_a_backend_that_cannot_be_meant_is_refused_before_it_connects(backend: type[Any]) -> None:
    with pytest.raises(ConnectorRefused, match='"url" is missing'):
        backend(storage_config({}), {})
    with pytest.raises(ConnectorRefused, match='"weights_revision"'):
        backend(storage_config({"url": "kv://127.0.0.1:1"}), {})


def test_sglang_finds_the_class_by_the_name_of_the_package(backend: type[Any]) -> None:
    import kvrouter_store.connectors.sglang as package

    assert package.KVStoreHiCache is backend
    with pytest.raises(AttributeError, match="no attribute 'KVStoreLoCache'"):
        getattr(package, "KVStoreLoCache")  # noqa: B009 (a type checker would complain)
