"""What vLLM's offloading is told, and what the connector refuses to start with."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvrouter_store.connectors.vllm.settings import ConnectorRefused, required_facts
from kvrouter_store.connectors.vllm.versions import facts_of
from kvrouter_store.connectors.vllm_offload.settings import OffloadSettings, check_start

URL = {"url": "kv://127.0.0.1:7400"}
NO_GROUPS = SimpleNamespace(kv_cache_groups=[])


def engine(extra: dict[str, Any], draft: str = "", algo: str = "sha256_cbor") -> SimpleNamespace:
    """vLLM's configuration of an engine with these settings, and a drafter of this name."""
    drafter = SimpleNamespace(draft_model_config=SimpleNamespace(model=draft)) if draft else None
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra, kv_role="kv_both"),
        cache_config=SimpleNamespace(enable_prefix_caching=True, prefix_caching_hash_algo=algo),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, decode_context_parallel_size=1),
        model_config=SimpleNamespace(model="m"),
        speculative_config=drafter,
    )


def groups_of(*modes: str) -> SimpleNamespace:
    """Groups of states that are cached in these modes."""
    specs = [SimpleNamespace(kv_cache_spec=SimpleNamespace(mamba_cache_mode=m)) for m in modes]
    return SimpleNamespace(kv_cache_groups=specs)


def start(configuration: SimpleNamespace, groups: SimpleNamespace = NO_GROUPS) -> OffloadSettings:
    facts = facts_of("0.32.0")
    assert facts is not None
    return check_start(configuration, groups, facts)


def test_a_url_is_all_that_a_user_must_say() -> None:
    told = start(engine(URL)).as_offloading(URL, "who")
    assert told["spec_name"] == "StoreOffloadingSpec"
    assert told["cpu_bytes_to_use"] == 4 << 30
    assert told["offload_prompt_only"] is False
    (tier,) = told["secondary_tiers"]
    assert tier == {
        **URL,
        "type": "KVStoreTier",
        "module_path": "kvrouter_store.connectors.vllm_tier",
        "identity": "who",
    }


def test_host_memory_is_vllms_and_threads_are_the_tiers() -> None:
    extra = {**URL, "cpu_bytes_to_use": 1 << 20, "threads": 2, "save": "prompt"}
    told = start(engine(extra)).as_offloading(extra, None)
    assert told["canonical_layout"] is False
    assert (told["cpu_bytes_to_use"], told["offload_prompt_only"]) == (1 << 20, True)
    (tier,) = told["secondary_tiers"]
    assert tier["threads"] == 2
    assert "cpu_bytes_to_use" not in tier


@pytest.mark.parametrize(
    ("configuration", "remedy"),
    [
        (engine({}), '"url"'),
        (engine({**URL, "parts": 2}), '"parts" is not a setting here'),
        (engine({**URL, "threads": 0}), '"threads" must be at least 1'),
        (engine({**URL, "cpu_bytes_to_use": 0}), '"cpu_bytes_to_use" must be at least 1'),
        (engine(URL, algo="sha256"), "--prefix-caching-hash-algo sha256_cbor"),
        (engine(URL, draft="another"), "leave --speculative-config out"),
    ],
)
def test_what_cannot_work_is_refused_with_the_flag_to_set(
    configuration: SimpleNamespace, remedy: str
) -> None:
    with pytest.raises(ConnectorRefused) as refused:
        start(configuration)
    assert remedy in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_drafter_in_the_models_own_checkpoint_is_no_other_model() -> None:
    assert start(engine(URL, draft="m")).url == URL["url"]


def test_states_must_lie_at_the_ends_of_blocks() -> None:
    assert start(engine(URL), groups_of("align", "align")).url == URL["url"]
    with pytest.raises(ConnectorRefused, match="--mamba-cache-mode align"):
        start(engine(URL), groups_of("align", "all"))


def test_a_series_that_ran_without_models_alone_is_for_those_that_ask_for_no_more() -> None:
    assert required_facts("0.33.0", models=False).series == "0.33"
    with pytest.raises(ConnectorRefused, match=r"not tested with vLLM 0\.33\.0: .* series 0\.32,"):
        required_facts("0.33.0", models=True)
    with pytest.raises(ConnectorRefused, match=r"series 0\.32, 0\.33,"):
        required_facts("0.31.0", models=False)
