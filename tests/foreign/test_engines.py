"""A router before two real vLLM engines on Mooncake Store, or on servers of LMCache.

Engine A prefills, engine B decodes with A's KV. The tokens must be those of a computation under
another cache_salt, by A alone. Of ours, only LMCache's servers have a store below them, and only
their coordinator is asked.
"""

import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.fakes.mooncake import MooncakeMaster
from tests.fakes.patience import eventually
from tests.lmcache.server import (
    CHUNK_TOKENS,
    own_environment,
    start_coordinator,
    start_engine,
    start_server,
)
from tests.vllm.asking import Question, answer, token_prompt
from tests.vllm.engines import Engine, EngineOptions, ask, free_port, running
from tests.vllm.install import install_into
from tests.vllm.models import TINY, model_folder
from tests.vllm.services import Service, start_router, start_store

LENGTHS = (100, 333, 1000, 2000)
INSIDE = Path(__file__).parent / "inside"
HOW = "set KVROUTER_LMCACHE_PYTHON and KVROUTER_MOONCAKE as .ci/stages/foreign.sh does"
pytestmark = [
    pytest.mark.foreign,
    pytest.mark.timeout(900),
    pytest.mark.tested("mooncake", "engines that share KV by it", "engines"),
    pytest.mark.tested("lmcache", "engines that share KV by it", "engines"),
]


class Coordinator:
    """LMCache's, which can be restarted on its port."""

    _running: Service | None = None

    def __init__(self, folder: Path) -> None:
        self._given = path_of("KVROUTER_LMCACHE_PYTHON"), own_environment(), folder, CHUNK_TOKENS
        self.address = f"127.0.0.1:{free_port()}"
        self.restart()

    def restart(self) -> None:
        """It forgets what it was told."""
        self.stop()
        port = int(self.address.rpartition(":")[2])
        self._running = start_coordinator(*self._given, port)
        self._running.wait_http(self.address, "/healthz")

    def stop(self) -> None:
        if self._running is not None:
            self._running.stop()

    def keys(self) -> int:
        """How many it knows in the second level."""
        page = ask(self.address, "GET", "/directory/stats", None, 10.0)[1]
        return int(json.loads(page)["l2_count"])


@dataclass
class Fleet:
    a: Engine
    b: Engine
    router: Service
    unit: int  # tokens of what the store holds: a block or a chunk
    coordinator: Coordinator | None

    def loaded(self) -> int:
        """Prompt tokens that engine B has loaded so far. Clients see what the prefill leg had."""
        return self.b.prompt_tokens()["external_kv_transfer"]

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


Setup = tuple[list[Engine], str, int, Coordinator | None]


def until(happened: Callable[[], bool]) -> None:
    """Wait for what other processes do."""
    assert eventually(happened, 60, 0.05)


def on_mooncake(folder: Path, cleanup: ExitStack) -> Setup:
    """A master; the engines lend it their memory."""
    python, site = path_of("KVROUTER_LMCACHE_PYTHON"), path_of("KVROUTER_MOONCAKE")
    master = MooncakeMaster(folder / "master.log", site)
    cleanup.callback(master.kill)
    master.start()
    settings = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": master.address,
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
        "PYTHONHASHSEED": "7",
        "PYTHONPATH": f"{site}{os.pathsep}{INSIDE}",
    }
    engines = []
    for core in ("0", "1"):
        transfer = {
            "kv_connector": "MooncakeCpu",
            "kv_connector_module_path": "mooncake_cpu",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"lookup_rpc_port": free_port(), "cache_prefix": "blue"},
        }
        name, model = f"engine-{core}", model_folder(TINY, python)
        options = EngineOptions(name, model, core, transfer, environment=environment)
        engines.append(Engine.start(python, options, folder, None))
    url = f"mooncake://{master.admin_address}?prefix=blue&seed=7"
    return engines, url, engines[0].options.block_tokens, None


def on_lmcache(folder: Path, cleanup: ExitStack) -> Setup:
    """A coordinator, and a server for each engine; the servers share one store node alone."""
    python = path_of("KVROUTER_LMCACHE_PYTHON")
    install_into(python)
    given = python, own_environment()
    coordinator = Coordinator(folder)
    cleanup.callback(coordinator.stop)
    store = start_store(folder)
    cleanup.callback(store.stop)
    flags = [
        *("--disable-metrics", "--coordinator-url", f"http://{coordinator.address}"),
        *("--coordinator-event-reporting", "--coordinator-event-flush-interval", "0.001"),
    ]
    servers = []
    for name in "ab":
        servers.append(start_server(name, *given, store.url, folder, flags=flags))
        cleanup.callback(servers[-1].service.stop)
    for server in servers:
        server.service.wait_http(server.service.http, "/healthcheck")
    engines = [
        start_engine(server, core, *given, folder)
        for server, core in zip(servers, "01", strict=True)
    ]
    url = f"lmcache://{coordinator.address}?chunk_size={CHUNK_TOKENS}&tier=l2"
    return engines, url, CHUNK_TOKENS, coordinator


@pytest.fixture(scope="module", params=[on_mooncake, on_lmcache], ids=["mooncake", "lmcache"])
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("foreign-engines")
    with ExitStack() as cleanup:
        (a, b), url, unit, coordinator = request.param(folder, cleanup)
        with running([a, b]):
            flags = ("--kv-connector", "store", "--policy", "prefix", "--landing-timeout", "20")
            router = start_router(folder, [a.address], [b.address], url, flags)
            cleanup.callback(router.stop)
            yield Fleet(a, b, router, unit, coordinator)


def test_decode_loads_what_the_router_has_seen_land_and_says_the_same(fleet: Fleet) -> None:
    draw = random.Random(51)
    for length in LENGTHS:
        question = Question(f"{length}", token_prompt(draw, length))
        alone = answer(fleet.a.address, replace(question, salt=f"alone {length}"))
        before, before_s = fleet.loaded(), fleet.metric("kvrouter:handoff_seconds_sum")
        handed = answer(fleet.router.address, question)
        loaded = fleet.loaded() - before
        landed_ms = (fleet.metric("kvrouter:handoff_seconds_sum") - before_s) * 1e3
        print(
            f"{loaded} of {length} tokens loaded, landed {landed_ms:.1f} ms after the prefill leg"
        )
        assert handed.tokens == alone.tokens
        assert loaded == length // fleet.unit * fleet.unit, fleet.b.tail()
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


@pytest.mark.parametrize("fleet", [on_lmcache], ids=["lmcache"], indirect=True, scope="module")
def test_a_coordinator_that_forgot_delays_nothing(fleet: Fleet) -> None:
    """Nobody tells it again of the first 960 tokens, which engine A finds in LMCache.

    Mooncake's master forgets keys with their KV.
    """
    coordinator, prompt = fleet.coordinator, token_prompt(random.Random(53), 1200)
    assert coordinator is not None
    known = coordinator.keys()
    answer(fleet.a.address, Question("begins", prompt[:961]))
    until(lambda: coordinator.keys() == known + 960 // fleet.unit)
    coordinator.restart()
    until(lambda: fleet.metric("kvrouter:store_connected") == 1)
    question = Question("goes on", prompt)
    alone = answer(fleet.a.address, replace(question, salt="alone 53"))
    before, before_s = fleet.loaded(), fleet.metric("kvrouter:handoff_seconds_sum")
    away = fleet.metric('kvrouter:landings_total{outcome="store_away"}')
    handed = answer(fleet.router.address, question)
    assert handed.tokens == alone.tokens
    assert fleet.metric("kvrouter:handoff_seconds_sum") - before_s < 5  # of 20
    assert fleet.metric('kvrouter:landings_total{outcome="store_away"}') == away
    assert fleet.metric('kvrouter:landings_total{outcome="timeout"}') == 0
    assert fleet.loaded() - before == 1200 // fleet.unit * fleet.unit, fleet.b.tail()
