"""SGLang's own pools and factory over a store node: what one process stores, another loads.

There is no engine here, for want of a build for CPUs: the tests stand where SGLang's cache
controller stands. Page keys are SGLang's own.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.patience import eventually
from tests.fakes.store import StoreProcess, overwrite_stored
from tests.sglang.engine import Engines, Raised

from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.connectors.sglang.shelf import names_of
from kvrouter_store.identity.block import Manifest

Pair = tuple[Engines, Engines]
StartStore = Callable[..., StoreProcess]
BATCH = 128  # pages that SGLang gives to a backend in one call
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]


def manifest_of(url: str, **options: Any) -> Manifest:
    """The one that is registered there."""
    with StoreClient(url, **options) as client:
        (registered,) = client.manifests()
        return registered.manifest


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("layout", ["page_first", "layer_first", "page_first_direct"])
def test_pages_of_one_process_come_to_another_as_they_were(
    layout: str, transport: str, engines: Pair, start_store: StartStore
) -> None:
    store = start_store()
    one, other = (each.start("a", store.url, layout, transport=transport) for each in engines)
    keys = engines[0].keys(1, 12)
    assert one.set(keys[:8])
    assert one.set(keys[8:11], keys[:8])
    assert other.exists(keys) == 11
    assert other.get(keys) == ["right"] * 11 + ["missing"]
    assert other.get(keys[11:]) == ["missing"]
    assert other.get([keys[9], keys[2]]) == ["right"] * 2
    assert one.registered()


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_copies_of_pages_come_as_they_were_where_v1_is_off(
    layout: str, engines: Pair, start_store: StartStore
) -> None:
    store = start_store()
    one, other = (each.start("a", store.url, layout, interface_v1=0) for each in engines)
    in_place = engines[1].start("b", store.url, layout)
    keys = engines[0].keys(2, 5)
    assert one.set(keys[:4])
    assert other.exists(keys) == 4
    assert other.get(keys) == ["right"] * 4 + ["missing"]
    assert in_place.exists(keys) == 0  # its bytes may be in another order


@pytest.mark.parametrize(
    "other",
    [
        {"layout": "layer_first"},
        {"layout": "page_first_direct"},
        {"dtype": "float16"},
        {"weights_revision": "r2"},
        {"flags": {"model_path": "org/large"}},
        {"flags": {"kv_cache_dtype": "fp8_e5m2"}},
        {"config": {"tp_rank": 1, "tp_size": 2}},
        {"config": {"pp_rank": 1, "pp_size": 2}},
        {"config": {"attn_cp_rank": 1, "attn_cp_size": 2}},
    ],
)
def test_an_engine_that_differs_finds_nothing(
    other: dict[str, Any], engines: Pair, start_store: StartStore
) -> None:
    store = start_store()
    one, stranger = engines[0].start("a", store.url), engines[1].start("a", store.url, **other)
    keys = engines[0].keys(3, 4)
    assert one.set(keys)
    assert stranger.exists(keys) == 0
    assert stranger.get(keys) == ["missing"] * 4
    assert engines[1].start("b", store.url).get(keys) == ["right"] * 4


@pytest.mark.parametrize("v1", [1, 0])
def test_a_long_prompt_is_stored_and_found_by_sglangs_own_loops(
    v1: int, engines: Pair, start_store: StartStore
) -> None:
    store = start_store()
    one, other = (each.start("a", store.url, interface_v1=v1) for each in engines)
    pages = 3 * BATCH + 10
    assert one.back_up(4, pages) == pages
    assert other.prefetch(4, pages + 50) == ["right"] * pages
    assert one.stats()["backup_pgs"] == other.stats()["prefetch_pgs"] == [BATCH] * 3 + [10]
    assert other.prefetch(4, 7) == ["right"] * 7
    assert other.prefetch(40, 3) == []


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_of_the_ranks_of_mla_the_first_stores_what_all_load(
    layout: str, engines: Pair, start_store: StartStore
) -> None:
    store = start_store()
    first, second, others = (
        where.start(name, store.url, layout, config={"is_mla_model": True} | ranks)
        for where, name, ranks in (
            (engines[0], "first", {"tp_rank": 0, "tp_size": 2}),
            (engines[1], "second", {"tp_rank": 1, "tp_size": 2}),
            (engines[1], "of four", {"tp_rank": 3, "tp_size": 4}),
        )
    )
    keys = engines[0].keys(12, 4)
    assert second.set(keys)
    assert first.exists(keys) == 0
    assert first.set(keys)
    assert second.get(keys) == others.get(keys) == ["right"] * 4
    assert first.registered()


def test_a_page_leaves_the_store_after_those_that_follow_it(
    engines: Pair, start_store: StartStore
) -> None:
    store = start_store("8MiB")
    one = engines[0].start("a", store.url)
    keys = engines[0].keys(5, BATCH)
    assert one.set(keys[:64])
    assert one.set(keys[64:], keys[:64])
    manifest, seed = manifest_of(store.url), 100
    with StoreClient(store.url) as client:
        while all(held := client.held(manifest, names_of(keys))):
            assert one.set(engines[0].keys(seed, 8))
            seed += 1
    kept = held.count(True)
    assert 0 < kept < BATCH
    assert held == [True] * kept + [False] * (BATCH - kept)
    assert one.exists(keys) == kept


def test_an_engine_goes_on_without_its_store_and_finds_it_again(
    engines: Pair, start_store: StartStore
) -> None:
    store = start_store()
    one, other = (each.start("a", store.url) for each in engines)
    keys = engines[0].keys(6, 4)
    assert one.set(keys)
    logged = len(engines[0].log)
    store.kill()
    assert not one.set(engines[0].keys(7, 2))
    assert other.exists(keys) == 0
    assert other.get(keys) == ["missing"] * 4
    store.start()
    assert eventually(lambda: one.set(keys))
    assert eventually(lambda: other.get(keys) == ["right"] * 4)
    assert "the store is away, going on without it" in engines[0].log[logged:]


def test_an_engine_starts_without_its_store(engines: Pair, start_store: StartStore) -> None:
    store = start_store()
    store.kill()
    one = engines[0].start("a", store.url)
    keys = engines[0].keys(8, 2)
    assert one.get(keys) == ["missing"] * 2
    store.start()
    assert eventually(lambda: one.set(keys))


def test_a_corrupt_page_is_a_miss_and_leaves_the_store(
    engines: Pair, start_store: StartStore
) -> None:
    store = start_store()
    one, other = (each.start("a", store.url) for each in engines)
    keys = engines[0].keys(9, 4)
    assert one.set(keys)
    manifest = manifest_of(store.url)
    zeros = bytes(manifest.block_bytes)
    overwrite_stored(store.unix_path, manifest, names_of(keys[1:2]), zeros)
    assert other.get(keys)[:2] == ["right", "missing"]
    assert other.exists(keys) == 1
    assert "1 pages were corrupt" in engines[1].log
    assert one.set(keys)
    assert other.get(keys) == ["right"] * 4


def test_tenants_find_nothing_of_each_other(
    engines: Pair, start_store: StartStore, tmp_path: Path
) -> None:
    tokens = {"red": "r" * 32, "blue": "b" * 32}
    file = tmp_path / "tokens"
    file.touch(0o600)
    file.write_text("".join(f"{name}:{token}\n" for name, token in tokens.items()))
    store = start_store("64MiB", "--token-file", str(file))
    red, blue, none = (
        engines[0].start("red", store.url, token=tokens["red"]),
        engines[1].start("blue", store.url, token=tokens["blue"]),
        engines[1].start("none", store.url),
    )
    keys = engines[0].keys(10, 4)
    assert red.set(keys)
    assert blue.exists(keys) == none.exists(keys) == 0
    assert blue.get(keys) == none.get(keys) == ["missing"] * 4
    assert not none.set(keys)
    assert engines[1].start("red", store.url, token=tokens["red"]).get(keys) == ["right"] * 4


def test_after_clear_an_engine_loads_nothing_that_was_stored(
    engines: Pair, start_store: StartStore
) -> None:
    store = start_store()
    one, other = (each.start("a", store.url, update_group="a") for each in engines)
    keys = engines[0].keys(11, 4)
    assert one.set(keys)
    one.clear()
    assert one.exists(keys) == 0
    assert other.get(keys) == ["right"] * 4
    other.clear()
    assert one.set(keys[:2])
    assert other.get(keys) == ["right"] * 2 + ["missing"] * 2


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"uri": "kv://127.0.0.1:1"}, "'uri' is not a setting"),
        ({"weights_revision": ""}, 'set "weights_revision"'),
        ({"transport": "foot"}, "\"transport\" is 'foot'"),
    ],
)
def test_a_setting_that_cannot_be_used_stops_the_start(
    wrong: dict[str, Any], told: str, engines: Pair
) -> None:
    flag = "--hicache-storage-backend-extra-config: "
    with pytest.raises(Raised, match=f"^ConnectorRefused: {flag}.*{told}"):
        engines[0].start("a", "kv://127.0.0.1:1", **wrong)


def test_a_model_with_more_than_one_pool_is_refused_at_its_start(
    engines: Pair, start_store: StartStore
) -> None:
    one = engines[0].start("a", start_store().url)
    for kind in ("mamba", "swa", "indexer", "draft"):
        with pytest.raises(Raised, match=f"^ConnectorRefused: KVStoreHiCache .* pool '{kind}' too"):
            one.add_pool(kind)


def test_a_layout_whose_pages_have_no_addresses_is_refused_at_its_start(engines: Pair) -> None:
    told = "^ConnectorRefused: .* layout page_unified .*; set --hicache-mem-layout page_first"
    with pytest.raises(Raised, match=told):
        engines[0].start("a", "kv://127.0.0.1:1", "page_unified")
