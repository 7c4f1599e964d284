"""Anthropic's and OpenAI's own clients before real vLLM engines: the same as from one engine."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.engines import Engine, EngineOptions
from tests.vllm.models import TINY, model_folder
from tests.vllm.run_inside import run_inside
from tests.vllm.services import Service, start_router

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")


@dataclass
class Fleet:
    """Two engines behind a router."""

    engines: list[Engine]
    router: Service


@pytest.fixture(scope="module")
def fleet(vllm_python: Path, site: Path | None, engine_folder: Path) -> Iterator[Fleet]:
    model = model_folder(TINY, vllm_python)
    with ExitStack() as cleanup:
        engines = []
        for core in ("0", "1"):
            options = EngineOptions(f"sdk-{core}", model, core, flags=TOOLS)
            engines.append(Engine.start(vllm_python, options, engine_folder, site))
            cleanup.callback(engines[-1].stop)
        for engine in engines:
            engine.wait_ready()
        addresses = [engine.address for engine in engines]
        router = start_router(engine_folder, [], addresses, None)
        cleanup.callback(router.stop)
        yield Fleet(engines, router)


def asked(python: Path, url: str) -> dict[str, Any]:
    done = run_inside(python, [], "sdks.py", url)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_both_clients_get_through_the_router_what_one_engine_answers(
    vllm_python: Path, fleet: Fleet
) -> None:
    alone = asked(vllm_python, fleet.engines[0].url)
    through = asked(vllm_python, fleet.router.url)
    assert through == alone
    for api in through.values():
        assert api["whole"] == api["streamed"] != ""
        assert api["not found"]
