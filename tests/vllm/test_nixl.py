"""Real vLLM with NixlConnector or NixlPushConnector behind the router: the same tokens, once.

A smoke test of a few hundred tokens: NIXL keeps a core busy where there are no devices.
"""

import json
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.asking import token_prompt
from tests.vllm.engines import Engine, EngineOptions, ask, running
from tests.vllm.models import TINY, model_folder
from tests.vllm.nixl import TRANSFER, loopback_environment, until_met
from tests.vllm.services import Service, start_router

from kvrouter.engines.families.nixl import PREFILL, Nixl

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.tested("vllm", "KV from engine to engine", "engines"),
]

HOW = "set KVROUTER_NIXL_SITE to the folder that tests/vllm/make_nixl.sh prints"
FREED_S = 15.0  # half of the lease


@dataclass
class Cluster:
    router: Service
    prefill: Engine
    decode: Engine
    pushes: bool


def nixl_environment() -> dict[str, str]:
    """How an engine finds NIXL, and uses it on the loopback; the test is skipped without it."""
    site = os.environ.get("KVROUTER_NIXL_SITE")
    if not site:
        pytest.skip(f"no NIXL: {HOW}")
    return {"PYTHONPATH": site, **loopback_environment()}


@pytest.fixture(scope="module", params=["NixlConnector", "NixlPushConnector"])
def cluster(
    request: pytest.FixtureRequest, vllm_python: Path, engine_folder: Path
) -> Iterator[Cluster]:
    model = model_folder(TINY, vllm_python)

    def engine(name: str, role: str, core: str) -> Engine:
        transfer = {**TRANSFER, "kv_connector": request.param, "kv_role": role}
        options = EngineOptions(name, model, core, transfer, environment=nixl_environment())
        return Engine.start(vllm_python, options, engine_folder, None)

    engines = [
        engine(f"{request.param}-prefill", "kv_producer", "0"),
        engine(f"{request.param}-decode", "kv_consumer", "1"),
    ]
    with running(engines):
        prefill, decode = engines
        router = start_router(engine_folder, [prefill.url], [decode.url], None, [])
        try:
            for each, role in ((prefill, "prefill"), (decode, "decode")):
                router.wait_log(f"engine {each.address} joins as {role}")
            until_met(router)
            yield Cluster(router, prefill, decode, request.param == "NixlPushConnector")
        finally:
            router.stop()


def token_ids(address: str, body: dict[str, Any], request_id: str = "") -> list[int]:
    body = {"model": "tiny", **body}
    status, raw = ask(address, "POST", "/v1/completions", body, 200.0, request_id=request_id)
    assert status == 200, raw
    found: list[int] = json.loads(raw)["choices"][0]["token_ids"]
    return found


def test_the_router_finds_out_that_it_is_nixl(cluster: Cluster) -> None:
    log = cluster.router.log.read_text()
    for engine in (cluster.prefill, cluster.decode):
        assert f"engine {engine.address} is vLLM with NixlConnector" in log


def test_tokens_are_those_of_one_engine_alone(cluster: Cluster) -> None:
    before = cluster.decode.prompt_tokens()
    sampling = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    lengths = (70, 130, 200)
    for length in lengths:
        body = {"prompt": token_prompt(random.Random(length), length), **sampling}
        handed = token_ids(cluster.router.address, body)
        alone = token_ids(cluster.prefill.address, {**body, "cache_salt": "alone"})
        assert handed == alone
    after = cluster.decode.prompt_tokens()
    assert after["external_kv_transfer"] - before["external_kv_transfer"] >= sum(lengths) - 3


def test_hand_overs_of_requests_with_the_same_id_are_not_mixed_up(cluster: Cluster) -> None:
    """NixlPushConnector matches the legs by their ids, which clients choose."""
    sampling = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    bodies = [{"prompt": token_prompt(random.Random(at), 90), **sampling} for at in range(4)]
    with ThreadPoolExecutor(len(bodies)) as clients:
        told = clients.map(lambda body: token_ids(cluster.router.address, body, "mine"), bodies)
        handed = list(told)
    for body, found in zip(bodies, handed, strict=True):
        assert found == token_ids(cluster.prefill.address, {**body, "cache_salt": "alone"})


def test_a_release_frees_what_the_prefill_engine_keeps(cluster: Cluster) -> None:
    prompt = {"model": "tiny", "prompt": token_prompt(random.Random(9), 120), "max_tokens": 1}
    asked = {**prompt, "ignore_eos": True, "kv_transfer_params": json.loads(PREFILL)}
    _, raw = ask(cluster.prefill.address, "POST", "/v1/completions", asked, 100.0)
    handoff = Nixl().read_prefill_answer(raw)
    assert handoff.transfer_params is not None
    if cluster.pushes:
        assert Nixl().release_body("tiny", handoff.transfer_params) is None
        return
    wait_usage(cluster.prefill, held=True)
    release = json.loads(Nixl().release_body("tiny", handoff.transfer_params) or b"")
    status, _ = ask(cluster.decode.address, "POST", "/v1/completions", release, 100.0)
    assert status == 400
    wait_usage(cluster.prefill, held=False)


def wait_usage(engine: Engine, *, held: bool) -> None:
    """Return once requests hold blocks of its KV cache, or none do."""
    until = time.monotonic() + FREED_S
    while (engine.counters()["vllm:kv_cache_usage_perc"] > 0) is not held:
        assert time.monotonic() < until
        time.sleep(0.1)
