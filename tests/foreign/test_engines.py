"""A router before two real vLLM engines on Mooncake Store or LMCache, and no store of ours.

Engine A prefills, engine B decodes with A's KV. The tokens must be those of a computation under
another cache_salt, by A alone.
"""

import json
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.asking import Question, answer, token_prompt
from tests.vllm.engines import OFFLINE, Engine, EngineOptions, ask, free_port, running
from tests.vllm.models import TINY, model_folder
from tests.vllm.services import Service, start_router

LENGTHS = (100, 333, 1000)
CHUNK_TOKENS = 64
INSIDE = Path(__file__).parent / "inside"
HOW = "set KVROUTER_LMCACHE_PYTHON and KVROUTER_MOONCAKE as .ci/stages/foreign.sh does"
pytestmark = [pytest.mark.foreign, pytest.mark.timeout(900)]


@dataclass
class Fleet:
    a: Engine
    b: Engine
    router: Service
    unit: int  # tokens of what the store holds: a block or a chunk

    def metric(self, line: str) -> float:
        """A counter of the router."""
        page = ask(self.router.address, "GET", "/metrics", None, 10.0)[1].decode()
        found = [row for row in page.splitlines() if row.startswith(line)]
        return float(found[0].rsplit(" ", 1)[1]) if found else 0.0


def path_of(variable: str) -> Path:
    named = os.environ.get(variable)
    if not named:
        pytest.skip(f"no environment: {HOW}")
    return Path(named)


def start_engines(
    python: Path, transfer: Mapping[str, Any], folder: Path, environment: Mapping[str, str]
) -> list[Engine]:
    model = model_folder(TINY, python)
    common = EngineOptions("", model, transfer=transfer, environment=environment)
    return [
        Engine.start(python, replace(common, name=name, core=core), folder, None)
        for name, core in (("engine-a", "0"), ("engine-b", "1"))
    ]


def transfer_of(connector: str, extra: Mapping[str, Any], module: str = "") -> dict[str, Any]:
    return {
        "kv_connector": connector,
        **({"kv_connector_module_path": module} if module else {}),
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": dict(extra),
    }


def on_mooncake(folder: Path, cleanup: ExitStack) -> tuple[list[Engine], str, int]:
    """A master; the engines lend it their memory."""
    python, site = path_of("KVROUTER_LMCACHE_PYTHON"), path_of("KVROUTER_MOONCAKE")
    program = site / "mooncake/mooncake_master"
    program.chmod(0o755)
    rpc, port = free_port(), free_port()
    command = [
        *(program, "--rpc_address", "127.0.0.1", "--rpc_port", rpc),
        *("--metrics_host", "127.0.0.1", "--metrics_port", port),
    ]
    master = Service.start("master", command, folder)
    cleanup.callback(master.stop)
    master.wait_http(f"127.0.0.1:{port}", "/health")
    settings = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": f"127.0.0.1:{rpc}",
        "protocol": "tcp",
        "device_name": "",
        "mode": "embedded",
        "global_segment_size": "256mb",
        "local_buffer_size": "64mb",
    }
    (folder / "mooncake.json").write_text(json.dumps(settings))
    environment = {
        "MOONCAKE_CONFIG_PATH": str(folder / "mooncake.json"),
        "MC_TCP_BIND_ADDRESS": "127.0.0.1",
        "PYTHONPATH": f"{site}{os.pathsep}{INSIDE}",
    }
    transfer = transfer_of("MooncakeCpu", {}, "mooncake_cpu")
    engines = start_engines(python, transfer, folder, environment)
    return engines, f"mooncake://127.0.0.1:{port}", engines[0].options.block_tokens


def on_lmcache(folder: Path, cleanup: ExitStack) -> tuple[list[Engine], str, int]:
    """A coordinator, and one server for both engines."""
    python = path_of("KVROUTER_LMCACHE_PYTHON")
    quiet = {**OFFLINE, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
    words = ["env", *(f"{key}={value}" for key, value in quiet.items())]
    program = [*words, python, "-m", "lmcache.cli.main"]
    port, http_port, coordinator_port = free_port(), free_port(), free_port()
    coordinator = Service.start(
        "coordinator",
        [
            *(*program, "coordinator", "--host", "127.0.0.1", "--port", coordinator_port),
            *("--chunk-size", CHUNK_TOKENS, "--disable-metrics"),
        ],
        folder,
    )
    cleanup.callback(coordinator.stop)
    coordinator.wait_http(f"127.0.0.1:{coordinator_port}", "/healthz")
    server = Service.start(
        "server",
        [
            *(*program, "server", "--host", "127.0.0.1", "--port", port),
            *("--http-host", "127.0.0.1", "--http-port", http_port),
            *("--chunk-size", CHUNK_TOKENS, "--l1-size-gb", "0.25", "--eviction-policy", "LRU"),
            *("--supported-transfer-mode", "engine_driven"),
            *("--coordinator-url", f"http://127.0.0.1:{coordinator_port}"),
            *("--coordinator-event-reporting", "--coordinator-event-flush-interval", "0.02"),
        ],
        folder,
    )
    cleanup.callback(server.stop)
    server.wait_http(f"127.0.0.1:{http_port}", "/healthcheck")
    extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
    transfer = transfer_of("LMCacheMPConnector", extra)
    engines = start_engines(python, transfer, folder, {**quiet, "PYTHONHASHSEED": "0"})
    url = f"lmcache://127.0.0.1:{coordinator_port}?chunk_size={CHUNK_TOKENS}"
    return engines, url, CHUNK_TOKENS


@pytest.fixture(scope="module", params=[on_mooncake, on_lmcache], ids=["mooncake", "lmcache"])
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("foreign-engines")
    with ExitStack() as cleanup:
        (a, b), url, unit = request.param(folder, cleanup)
        with running([a, b]):
            flags = ("--kv-connector", "store", "--policy", "prefix", "--landing-timeout", "20")
            router = start_router(folder, [a.address], [b.address], url, flags)
            cleanup.callback(router.stop)
            yield Fleet(a, b, router, unit)


def test_decode_loads_what_the_router_has_seen_land_and_says_the_same(fleet: Fleet) -> None:
    draw, loaded = random.Random(51), 0
    for length in LENGTHS:
        question = Question(f"{length}", token_prompt(draw, length))
        alone = answer(fleet.a.address, replace(question, salt=f"alone {length}"))
        handed = answer(fleet.router.address, question)
        assert handed.tokens == alone.tokens
        assert handed.cached_tokens == length // fleet.unit * fleet.unit
        loaded += handed.cached_tokens
    assert fleet.b.prompt_tokens()["external_kv_transfer"] == loaded
    assert fleet.metric('kvrouter:landings_total{outcome="landed"}') == len(LENGTHS)
    assert fleet.metric("kvrouter:handoff_missing_total") == 0


def test_what_the_store_holds_takes_no_prefill_leg(fleet: Fleet) -> None:
    alone = 'kvrouter:plans_total{why="little missing"}'
    hit = 'kvrouter:prefix_hit_tokens_total{model="tiny",source="store"}'
    question = Question("twice", token_prompt(random.Random(52), 641))
    first = answer(fleet.router.address, question)
    assert (fleet.metric(alone), fleet.metric(hit)) == (0, 0)
    assert answer(fleet.router.address, question).tokens == first.tokens
    assert (fleet.metric(alone), fleet.metric(hit)) == (1, 640)
