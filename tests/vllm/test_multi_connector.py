"""Real engines with NixlConnector and ours by MultiConnector: one hands over, one keeps."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.asking import Question, answer, difference, reference, token_prompt
from tests.vllm.engines import Engine, EngineOptions, running, transfer_config
from tests.vllm.models import TINY, model_folder
from tests.vllm.nixl import TRANSFER, until_met
from tests.vllm.services import Service, start_router, start_store
from tests.vllm.test_nixl import nixl_environment

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.tested("vllm", "MultiConnector of NIXL and the store", "engines"),
]


@dataclass
class Cluster:
    store: Service
    router: Service
    prefill: Engine
    decode: Engine


@pytest.fixture(params=["nixl first", "ours first"])
def cluster(
    vllm_python: Path, site: Path | None, engine_folder: Path, request: pytest.FixtureRequest
) -> Iterator[Cluster]:
    store = start_store(engine_folder, name="store-of-two")
    model = model_folder(TINY, vllm_python)

    def engine(name: str, core: str) -> Engine:
        both: list[dict[str, Any]] = [
            {**TRANSFER, "kv_role": "kv_both"},
            transfer_config(store.url, name=name, save="prompt"),
        ]
        if request.param == "ours first":
            both.reverse()
        transfer = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": both},
        }
        environment = nixl_environment()
        if site is not None:
            environment["PYTHONPATH"] += f":{site}"
        options = EngineOptions(name, model, core, transfer, environment=environment)
        return Engine.start(vllm_python, options, engine_folder, None)

    engines = prefill, decode = engine("two-prefill", "0"), engine("two-decode", "1")
    try:
        with running(engines):
            flags = ["--prefill-threshold", "0", "--landing-timeout", "10"]
            router = start_router(engine_folder, [prefill.url], [decode.url], store.url, flags)
            try:
                until_met(router)
                yield Cluster(store, router, prefill, decode)
            finally:
                router.stop()
    finally:
        store.stop()


def test_a_prompt_is_handed_over_by_nixl_and_reused_from_the_store(cluster: Cluster) -> None:
    prefill, decode = cluster.prefill, cluster.decode
    for engine in (prefill, decode):
        engine.wait_log("of the store's memory")
    one = Question("one", token_prompt(random.Random(1), 210), max_tokens=12)
    other = Question("other", token_prompt(random.Random(2), 210), max_tokens=12)
    longer = replace(other, prompt=[*other.prompt, *range(40, 60)])
    expected = [reference(prefill.address, replace(q, salt="alone")) for q in (one, longer)]

    before = moved(cluster)
    assert not difference(expected[0], answer(cluster.router.address, one))
    by_nixl, by_store = gained(before, moved(cluster))
    assert by_nixl > 0
    assert by_store == 0

    stored = cluster.store.stats()["commits_total"]
    answer(decode.address, other)  # computed there, and kept in the store
    cluster.store.wait_stored(stored + 6)
    before = moved(cluster)
    assert not difference(expected[1], answer(cluster.router.address, longer))
    by_nixl, by_store = gained(before, moved(cluster))
    assert by_nixl > 0
    assert by_store == 192  # whole blocks, loaded by the prefill engine
    prefill.wait_counter("vllm:kv_cache_usage_perc", 0.0)


def moved(cluster: Cluster) -> tuple[int, int]:
    """Transfers that decode fetched by NIXL; tokens that prefill loaded from the store."""
    counted = cluster.decode.counters()["vllm:nixl_xfer_time_seconds_count"]
    return int(counted), cluster.prefill.prompt_tokens()["external_kv_transfer"]


def gained(before: tuple[int, int], after: tuple[int, int]) -> tuple[int, int]:
    return after[0] - before[0], after[1] - before[1]
