"""What engines must agree in to read each other's pages, and what they are refused for."""

from pathlib import Path
from typing import Any

import pytest
from tests.fakes.sglang import HostPool, engine_flags, storage_config

from kvrouter_store.connectors.settings import ConnectorRefused
from kvrouter_store.connectors.sglang.identity import (
    engine_facts,
    manifest_of,
    model_of,
    pool_facts,
)
from kvrouter_store.connectors.sglang.settings import HiCacheSettings, moves_by_address

URL = {"url": "kv://127.0.0.1:7400"}
LOADER = {"backend_name": "kv", "module_path": "kvrouter_store.connectors.sglang"}


def digest(pool: HostPool, flags: Any = None, **config: Any) -> bytes:
    engine = engine_facts(flags or engine_flags(), storage_config({}, **config))
    facts = {**engine, **pool_facts(pool)}
    _, sizes = pool.get_page_buffer_meta(range(pool.page_size))
    return manifest_of(("tiny", "r1"), sizes, facts).digest


def changed(**changes: Any) -> HostPool:
    pool = HostPool()
    vars(pool).update(changes)
    return pool


@pytest.mark.parametrize(
    "pool",
    [
        HostPool("layer_first"),
        HostPool("page_first_direct"),
        HostPool(page_size=8),
        HostPool(layers=4),
        changed(start_layer=1, end_layer=4),
        changed(head_num=1, head_dim=16),
        changed(dtype="torch.float16"),
        changed(storage_format_tag="token-major"),
        type("OtherPool", (HostPool,), {})(),
    ],
)
def test_pools_that_order_bytes_otherwise_share_nothing(pool: HostPool) -> None:
    assert digest(pool) != digest(HostPool())
    assert digest(HostPool()) == digest(HostPool(pages=8))


@pytest.mark.parametrize(
    "rank",
    [
        {"tp_rank": 1, "tp_size": 2},
        {"tp_rank": 0, "tp_size": 2},
        {"pp_rank": 1, "pp_size": 2},
        {"attn_cp_rank": 1, "attn_cp_size": 2},
        {"dcp_rank": 1, "dcp_size": 2},
    ],
)
def test_each_rank_has_pages_of_its_own(rank: dict[str, int]) -> None:
    assert digest(HostPool(), **rank) != digest(HostPool())


@pytest.mark.parametrize(
    "flag",
    [
        {"kv_cache_dtype": "fp8_e5m2"},
        {"dtype": "float16"},
        {"quantization": "fp8"},
        {"quantization_param_path": "scales.json"},
        {"json_model_override_args": '{"rope_theta": 5}'},
    ],
)
def test_engines_with_other_flags_that_change_kv_share_nothing(flag: dict[str, str]) -> None:
    assert digest(HostPool(), engine_flags(**flag)) != digest(HostPool())
    assert digest(HostPool(), engine_flags(model_path="elsewhere")) == digest(HostPool())


def test_ranks_of_mla_hold_the_same_pages() -> None:
    mla = {"is_mla_model": True, "tp_size": 2}
    assert digest(HostPool(), **mla, tp_rank=1) == digest(HostPool(), **mla, tp_rank=0)
    assert digest(HostPool(), **mla, tp_rank=1) != digest(HostPool(), tp_size=2, tp_rank=1)


def test_weights_and_models_are_never_mixed_up() -> None:
    names = [("tiny", "r1"), ("tiny", "r2"), ("large", "r1")]
    assert len({manifest_of(name, [8, 8], {}).digest for name in names}) == 3


def test_the_order_of_pieces_of_equal_sizes_together_matters() -> None:
    orders = [[16], [8, 8], [4, 12], [12, 4], [8, 4, 4]]
    assert len({manifest_of(("tiny", "r1"), each, {}).digest for each in orders}) == 5


def test_a_local_model_is_known_by_its_weights_and_options_wherever_it_lies(
    tmp_path: Path,
) -> None:
    found = {}
    kinds = {"a": (b"1", ""), "b": (b"1", ""), "c": (b"2", ""), "d": (b"1", "{}")}
    for place, (weights, options) in kinds.items():
        folder = tmp_path / place / "tiny"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(weights)
        (folder / "config.json").write_text(options)
        flags = engine_flags(model_path=str(folder))
        found[place] = model_of(flags, HiCacheSettings.parse(URL))
    assert found["a"] == found["b"]
    assert len(set(found.values())) == 3
    assert {name for name, _ in found.values()} == {"tiny"}


def test_weights_that_engines_cannot_compare_are_refused_with_the_setting_to_add() -> None:
    with pytest.raises(ConnectorRefused, match=r'org/tiny have no revision .* "weights_revision"'):
        model_of(engine_flags(), HiCacheSettings.parse(URL))
    with pytest.raises(ConnectorRefused, match="--revision to the commit"):
        model_of(engine_flags(revision="main"), HiCacheSettings.parse(URL))
    commit = "0123456789" * 4
    by_flag = model_of(engine_flags(revision=commit), HiCacheSettings.parse(URL))
    given = HiCacheSettings.parse(URL | {"weights_revision": "r2", "model": "small"})
    assert by_flag == ("tiny", commit)
    assert model_of(engine_flags(revision=commit), given) == ("small", "r2")


def test_settings_stand_beside_sglangs_own_and_others_are_refused_with_sglangs_flag() -> None:
    extra = {**LOADER, "class_name": "KVStoreHiCache", "interface_v1": 1, **URL}
    # Decode engines that offload KV pass these on.
    extra |= {"hicache_storage_pass_prefix_keys": True, "prefetch_threshold": 256}
    assert HiCacheSettings.parse(extra).url == URL["url"]
    for wrong in ({"uri": "kv://a:1"}, {"save": "all"}, {"deadline_s": 0}, {"transport": "foot"}):
        with pytest.raises(ConnectorRefused, match=r"^--hicache-storage-backend-extra-config: "):
            HiCacheSettings.parse({**extra, **wrong})
    with pytest.raises(ConnectorRefused, match='"url" is missing'):
        HiCacheSettings.parse(LOADER)


def test_sglang_moves_pages_by_address_only_where_it_is_told_to() -> None:
    assert moves_by_address({"interface_v1": 1})
    assert not moves_by_address({"interface_v1": 0})
    assert not moves_by_address({})
