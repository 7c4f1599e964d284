"""What vLLM's offloading is told, and what the connector refuses to start with."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvrouter_store._core import StoreServer
from kvrouter_store.connectors.settings import ConnectorRefused
from kvrouter_store.connectors.vllm import host_memory
from kvrouter_store.connectors.vllm.host_memory import STEPS, Host
from kvrouter_store.connectors.vllm.start import (
    EngineSettings,
    check_start,
    check_version,
    host_bytes,
)
from kvrouter_store.connectors.vllm.versions import ran_of

URL = {"url": "kv://127.0.0.1:7400"}
SMALL: dict[str, Any] = {**URL, "cpu_bytes_to_use": 1 << 20}
NO_GROUPS = SimpleNamespace(kv_cache_groups=[])


def engine(extra: dict[str, Any], draft: str = "", **changes: Any) -> SimpleNamespace:
    """vLLM's configuration of an engine with these settings, and a drafter of this name."""
    given: dict[str, Any] = {
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": "sha256_cbor",
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        **changes,
    }
    drafter = SimpleNamespace(draft_model_config=SimpleNamespace(model=draft)) if draft else None
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra, kv_role="kv_both"),
        cache_config=SimpleNamespace(**given),
        parallel_config=SimpleNamespace(**given),
        model_config=SimpleNamespace(model="m"),
        speculative_config=drafter,
    )


def groups_of(*modes: str) -> SimpleNamespace:
    """Groups of states that are cached in these modes."""
    specs = [SimpleNamespace(kv_cache_spec=SimpleNamespace(mamba_cache_mode=m)) for m in modes]
    return SimpleNamespace(kv_cache_groups=specs)


def start(configuration: SimpleNamespace, groups: SimpleNamespace = NO_GROUPS) -> EngineSettings:
    return check_start(configuration, groups, "0.32.0+cpu")


def test_a_url_is_all_that_a_user_must_say() -> None:
    told = EngineSettings.parse(URL, "kv_both").as_offloading(URL, 1 << 30, "who")
    assert told["spec_name"] == "StoreOffloadingSpec"
    assert told["cpu_bytes_to_use"] == 1 << 30
    assert told["offload_prompt_only"] is False
    assert told["pool"] == EngineSettings.parse(URL, "kv_both")
    over_tcp = EngineSettings.parse({**URL, "transport": "tcp"}, "kv_both")
    assert over_tcp.as_offloading(URL, 1 << 30, "who")["pool"] is None
    (tier,) = told["secondary_tiers"]
    assert tier == {
        **URL,
        "type": "KVStoreTier",
        "module_path": "kvrouter_store.connectors.vllm_tier",
        "identity": "who",
        "pinned": True,
    }


def test_host_memory_is_vllms_and_threads_are_the_tiers() -> None:
    extra = {**URL, "cpu_bytes_to_use": 1 << 20, "threads": 2, "save": "prompt"}
    told = start(engine(extra)).as_offloading(extra, 1 << 20, None)
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
        (engine({**URL, "cpu_bytes_to_use": -1}), '"cpu_bytes_to_use" must be at least 0'),
        (engine({**URL, "cpu_bytes_to_use": 1 << 60}), "a larger --shm-size"),
        (
            engine(SMALL, prefix_caching_hash_algo="sha256"),
            "--prefix-caching-hash-algo sha256_cbor",
        ),
        (engine(SMALL, enable_prefix_caching=False), "--enable-prefix-caching"),
        (engine(SMALL, pipeline_parallel_size=2), "--pipeline-parallel-size 1"),
        (engine(SMALL, decode_context_parallel_size=2), "--decode-context-parallel-size 1"),
        (engine(SMALL, draft="another"), "leave --speculative-config out"),
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
    assert start(engine(SMALL, draft="m")).url == URL["url"]


def test_states_must_lie_at_the_ends_of_blocks() -> None:
    assert start(engine(SMALL), groups_of("align", "align")).url == URL["url"]
    with pytest.raises(ConnectorRefused, match="--mamba-cache-mode align"):
        start(engine(SMALL), groups_of("align", "all"))


def sized(extra: dict[str, Any], name: str = "engine") -> int:
    """Host memory of an engine whose steps compute 128 MiB, for prompts of one GiB."""
    cache = SimpleNamespace(
        num_blocks=100,
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16))],
        kv_cache_tensors=[SimpleNamespace(size=100 << 20)],
    )
    configuration = engine(extra, world_size=1)
    configuration.model_config.max_model_len = 16 << 10
    configuration.scheduler_config = SimpleNamespace(max_num_batched_tokens=2048)
    configuration.kv_transfer_config.engine_id = name
    settings = EngineSettings.parse(extra, "kv_both")
    return host_bytes(settings, configuration, cache)


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in the place of /dev/shm, on a host of 64 GiB."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(host_memory, "SHARED", folder)
    monkeypatch.setattr(host_memory.Host, "here", lambda: Host(64 << 30, 64 << 30, 0))
    return folder


def test_host_memory_is_what_is_set_or_what_the_processes_of_the_engine_agreed_on(
    shared: Path,
) -> None:
    assert start(engine(SMALL)).cpu_bytes_to_use == SMALL["cpu_bytes_to_use"]
    assert sized(URL) == 16 << 30
    assert [path.read_text() for path in shared.iterdir()] == [str(16 << 30)]


def test_beside_a_store_on_its_host_an_engine_takes_what_a_few_steps_compute(
    shared: Path, tmp_path: Path
) -> None:
    node = StoreServer(unix_path=str(tmp_path / "s"), pool_bytes=1 << 20)
    node.start()
    url = {"url": f"kv://127.0.0.1:{node.port}"}
    here = [sized(url), sized({**url, "neighbours": "any"}, "loads from other hosts")]
    others = [sized({**url, "transport": "tcp"}, "not mapped")]
    node.stop()
    others.append(sized(url, "the store is away"))
    assert here == [STEPS * (128 << 20)] * 2
    assert others == [16 << 30] * 2
    assert len(list(shared.iterdir())) == 4


@pytest.mark.parametrize("version", ["0.31.0", "main"])
@pytest.mark.parametrize("allowed", [False, True])
def test_an_older_vllm_is_refused_whatever_is_allowed(version: str, allowed: bool) -> None:
    with pytest.raises(
        ConnectorRefused, match=rf"vLLM {version}: .* series 0\.32, 0\.33"
    ) as refused:
        check_version(version, allow_untested=allowed)
    assert "allow_untested" not in str(refused.value)


def test_a_newer_vllm_is_refused_unless_that_is_allowed() -> None:
    with pytest.raises(ConnectorRefused, match='"allow_untested": true'):
        check_version("0.100.2+cu130", allow_untested=False)
    check_version("0.100.2+cu130", allow_untested=True)
    assert ran_of("0.100.2+cu130") == "nothing"


def test_a_series_without_engines_of_its_own_in_the_tests_needs_no_permission() -> None:
    check_version("0.33.0", allow_untested=False)
    assert ran_of("0.33.0") == "schedulers"


@pytest.mark.parametrize(("transport", "mapped"), [("auto", True), ("shm", True), ("tcp", False)])
def test_ranks_load_from_the_stores_memory_where_they_may_map_it(
    transport: str, mapped: bool
) -> None:
    extra = {**URL, "transport": transport}
    settings = EngineSettings.parse(extra, "kv_both")
    told = settings.as_offloading(extra, 1 << 20, None)
    assert (told["pool"] is settings) == mapped
