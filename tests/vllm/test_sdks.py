"""Anthropic's and OpenAI's own clients before real vLLM engines: the same as from one engine."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.engines import BLOCK_TOKENS, Engine, EngineOptions, ask, transfer_config
from tests.vllm.models import TINY, model_folder
from tests.vllm.run_inside import run_inside
from tests.vllm.services import Service, start_router, start_store

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.tested("vllm", "clients of OpenAI and Anthropic", "engines"),
]
FLAGS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-scale-out")


@dataclass
class Fleet:
    """Two engines behind two routers."""

    engines: list[Engine]
    router: Service  # each engine answers alone
    legs: Service  # the first engine prefills, the second one decodes


@pytest.fixture(scope="module")
def fleet(vllm_python: Path, site: Path | None, engine_folder: Path) -> Iterator[Fleet]:
    model = model_folder(TINY, vllm_python)
    with ExitStack() as cleanup:
        store = start_store(engine_folder, name="store-sdks")
        cleanup.callback(store.stop)
        engines = []
        for core in ("0", "1"):
            transfer = transfer_config(store.url, name=f"sdk-{core}")
            options = EngineOptions(f"sdk-{core}", model, core, transfer, FLAGS)
            engines.append(Engine.start(vllm_python, options, engine_folder, site))
            cleanup.callback(engines[-1].stop)
        for engine in engines:
            engine.wait_ready()
        addresses = [engine.address for engine in engines]
        router = start_router(engine_folder, [], addresses, None)
        cleanup.callback(router.stop)
        legs = start_router(engine_folder, addresses[:1], addresses[1:], store.url)
        cleanup.callback(legs.stop)
        yield Fleet(engines, router, legs)


def asked(python: Path, url: str) -> dict[str, Any]:
    done = run_inside(python, [], "sdks.py", url)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_both_clients_get_by_both_legs_what_one_engine_answers(
    vllm_python: Path, fleet: Fleet
) -> None:
    prefill, decode = fleet.engines
    by_legs = asked(vllm_python, fleet.legs.url)
    prompts = prefill.prompt_tokens()["local_compute"] // BLOCK_TOKENS * BLOCK_TOKENS
    loaded = decode.prompt_tokens()["external_kv_transfer"]
    plans = ask(fleet.legs.address, "GET", "/metrics", None, 10.0)[1].decode().splitlines()
    assert by_legs == asked(vllm_python, prefill.url)
    assert 'kvrouter:plans_total{why="prefill"} 2.0' in plans  # messages and responses; known then
    assert 'kvrouter:landings_total{outcome="landed"} 2.0' in plans
    assert prompts - BLOCK_TOKENS <= loaded <= prompts > 10 * BLOCK_TOKENS


def test_both_clients_get_through_the_router_what_one_engine_answers(
    vllm_python: Path, fleet: Fleet
) -> None:
    alone = asked(vllm_python, fleet.engines[0].url)
    through = asked(vllm_python, fleet.router.url)
    assert through == alone
    for api in through.values():
        assert api["whole"] == api["streamed"] != ""
        assert api["not found"]
