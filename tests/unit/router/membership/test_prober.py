"""Probes against a small engine of aiohttp, on a free port."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from aiohttp import web
from tests.fakes.patience import until

from kvrouter.engines.engine import Engine, Identity, Role
from kvrouter.engines.families import Families
from kvrouter.engines.families.pages import ProbeFailed
from kvrouter.engines.life import LifeLimits, Lives
from kvrouter.engines.pool import EnginePool
from kvrouter.membership.detect import EngineDetector, read_models
from kvrouter.membership.probe_client import ProbeClient
from kvrouter.membership.prober import Prober
from kvrouter_store.identity.chain import root_hash

ROOT = root_hash("seed")


@dataclass
class FakeEngine:
    """Answers probes; what it says can be changed while it runs."""

    healthy: bool = True
    models: Any = field(
        default_factory=lambda: [
            {"id": "m", "root": "/m", "parent": None, "max_model_len": 4096},
            {"id": "lora", "root": "/adapters/l", "parent": "m"},
        ]
    )
    params: Any = field(
        default_factory=lambda: {
            "kvstore": {"manifest": "cd" * 32, "blocks": 0, "block_tokens": 32, "root": ROOT.hex()}
        }
    )
    metrics: str = ""
    completion_status: int = 200
    completion_error: str = ""
    openapi: Any = None
    takes_priority: bool = True
    hang: bool = False
    silent: set[str] = field(default_factory=set)  # pages that do not answer
    hang_completion: bool = False
    may_complete: asyncio.Event = field(default_factory=asyncio.Event)
    probes: list[Any] = field(default_factory=list)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.list_models)
        app.router.add_get("/metrics", self.tell_metrics)
        app.router.add_get("/openapi.json", self.tell_openapi)
        app.router.add_post("/v1/completions", self.complete)
        return app

    async def health(self, request: web.Request) -> web.Response:
        if self.hang:
            await asyncio.Event().wait()
        return web.Response(status=200 if self.healthy else 503, text="ill" * 200)

    async def list_models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": self.models})

    async def tell_metrics(self, request: web.Request) -> web.Response:
        await self.keep_silent("/metrics")
        return web.Response(text=self.metrics)

    async def keep_silent(self, page: str) -> None:
        if page in self.silent:
            await asyncio.Event().wait()

    async def tell_openapi(self, request: web.Request) -> web.Response:
        await self.keep_silent("/openapi.json")
        if self.openapi is None:
            raise web.HTTPNotFound
        if isinstance(self.openapi, int):
            return web.Response(status=self.openapi)
        return web.json_response(self.openapi)

    async def complete(self, request: web.Request) -> web.Response:
        self.probes.append(await request.json())
        if self.hang_completion:
            await self.may_complete.wait()
        if self.probes[-1].get("priority") and not self.takes_priority:
            refusal = "Got priority 1 but Priority scheduling is not enabled."  # vLLM's V0
            return web.json_response({"object": "error", "message": refusal}, status=400)
        answer: Any = {"choices": [{"text": "a"}], "kv_transfer_params": self.params}
        if self.completion_error:
            answer = {"error": {"message": self.completion_error}}
        return web.json_response(answer, status=self.completion_status)


@dataclass
class Bench:
    fake: FakeEngine
    pool: EnginePool
    engine: Engine
    runner: web.AppRunner

    def prober(self, timeout_s: float = 5.0, joins: Any = None, **options: Any) -> Prober:
        client = ProbeClient(timeout_s=timeout_s)
        detector = EngineDetector(Families(), client.body, **options)
        lives = Lives(self.pool.clock, LifeLimits(failed_checks=2))
        return Prober(self.pool, client, detector, interval_s=0.01, lives=lives, joins=joins)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    fake, pool = FakeEngine(), EnginePool()
    runner = web.AppRunner(fake.app(), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    yield Bench(fake, pool, pool.add(f"127.0.0.1:{port}", Role.DECODE), runner)
    await runner.cleanup()


async def first_probe(prober: Prober, engine: Engine) -> None:
    prober.watch(engine)
    await prober.probed()


async def test_an_engine_is_identified_when_it_joins(bench: Bench) -> None:
    prober = bench.prober()
    await first_probe(prober, bench.engine)
    await prober.close()
    assert bench.engine.identity == Identity(
        ("m", "lora"),
        4096,
        32,
        "cd" * 32,
        ROOT,
        (("lora", "/adapters/l"),),
        family="store",
        model_path="/m",
    )
    assert [probe["max_tokens"] for probe in bench.fake.probes] == [1]


async def test_an_identity_is_completed_before_its_engine_joins(bench: Bench) -> None:
    joined: list[tuple[str | None, bool]] = []

    async def joins(identity: Identity) -> Identity:
        joined.append((identity.manifest, bench.engine.identity is not None))
        return replace(identity, manifest="another")

    bench.fake.params["kvstore"]["refusal"] = "two groups"
    prober = bench.prober(joins=joins)
    await first_probe(prober, bench.engine)
    await prober.close()
    assert joined == [("cd" * 32, False)]
    assert bench.engine.identity is not None
    assert bench.engine.identity.manifest == "another"
    assert bench.engine.identity.refusal == "two groups"


async def test_without_our_connector_the_block_size_is_read_from_metrics(bench: Bench) -> None:
    bench.fake.params = None
    bench.fake.metrics = (
        "# HELP vllm:cache_config_info x\n"
        'vllm:cache_config_info{block_size="64",cache_dtype="auto",engine="0"} 1.0\n'
    )
    prober = bench.prober()
    await first_probe(prober, bench.engine)
    await prober.close()
    assert bench.engine.identity == Identity(
        ("m", "lora"),
        4096,
        64,
        adapters=(("lora", "/adapters/l"),),
        family="store",
        model_path="/m",
    )


async def test_the_size_of_its_cache_is_read_from_vllms_metrics(bench: Bench) -> None:
    bench.fake.params = None
    bench.fake.metrics = 'vllm:cache_config_info{block_size="64",num_gpu_blocks="500"} 1.0\n'
    prober = bench.prober()
    await first_probe(prober, bench.engine)
    await prober.close()
    assert bench.engine.identity is not None
    assert bench.engine.identity.kv_tokens == 32_000


async def test_an_engine_without_a_known_block_size_joins(bench: Bench) -> None:
    bench.fake.params, bench.fake.models = None, [{"id": "m"}]
    prober = bench.prober()
    await first_probe(prober, bench.engine)
    await prober.close()
    assert bench.engine.identity == Identity(("m",), family="store")


async def test_an_engine_that_is_down_at_the_start_may_join_later(bench: Bench) -> None:
    bench.fake.healthy = False
    prober = bench.prober()
    await first_probe(prober, bench.engine)
    assert list(bench.pool.engines(Role.DECODE)) == []
    bench.fake.healthy = True
    await until(lambda: list(bench.pool.engines(Role.DECODE)) == [bench.engine])
    await prober.close()


async def test_an_engine_that_falls_ill_leaves_and_comes_back_when_it_is_well(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    prober = bench.prober()
    await first_probe(prober, bench.engine)
    bench.fake.healthy = False
    await until(lambda: bench.engine.identity is None)
    bench.fake.healthy = True
    bench.fake.params = None
    await until(lambda: bench.engine.identity is not None)
    assert bench.engine.manifest is None
    await prober.close()
    assert caplog.text.count("is not available: /health answers 503") == 1


async def test_an_engine_that_answers_no_check_may_be_busy_and_stays(bench: Bench) -> None:
    prober = bench.prober(timeout_s=0.02)
    bench.fake.params = None
    await first_probe(prober, bench.engine)
    await until(lambda: bench.engine.identity is not None)
    bench.fake.hang = True
    pulse = prober.lives.pulse(bench.engine)
    await until(lambda: pulse.missed > 3)
    assert bench.engine.identity is not None
    assert prober.problem(bench.engine) == "/health does not answer within 0.02 s"
    bench.fake.hang = False
    await until(lambda: pulse.missed == 0)
    assert bench.engine.joins == 1
    await prober.close()


async def test_an_engine_that_stalled_must_compute_a_token_before_it_joins(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    prober = bench.prober()
    bench.fake.params = None
    await first_probe(prober, bench.engine)
    await until(lambda: bench.engine.identity is not None)
    bench.fake.completion_status = 500
    bench.pool.leave(bench.engine, "stalled", "it computes nothing")
    told = await prober.check(bench.engine)
    assert told is not None
    assert told.startswith("/v1/completions answers 500")
    assert str(prober.problem(bench.engine)).startswith("it computes nothing")
    bench.fake.completion_status = 200
    await until(lambda: bench.engine.identity is not None)
    assert prober.problem(bench.engine) is None
    assert caplog.text.count("which had stalled, computes again") == 1
    await prober.close()


async def test_an_engine_whose_port_is_closed_is_logged_once(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    await bench.runner.cleanup()
    prober = bench.prober()
    await first_probe(prober, bench.engine)
    problems = [await prober.check(bench.engine) for _ in range(3)]
    await prober.close()
    assert all(problem and "/health" in problem for problem in problems)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"models": []}, "/v1/models names no model"),
        ({"models": "x"}, "/v1/models is not OpenAI's list"),
        ({"models": [{"name": "m"}]}, "/v1/models is not OpenAI's list"),
        ({"completion_status": 500}, "/v1/completions answers 500"),
        ({"params": {"kvstore": {"root": "zz"}}}, "prefill answer"),
        ({"healthy": False}, "/health answers 503: illill"),
    ],
)
async def test_what_is_wrong_with_an_engine_is_one_sentence(
    bench: Bench, change: dict[str, Any], problem: str
) -> None:
    for name, value in change.items():
        setattr(bench.fake, name, value)
    prober = bench.prober()
    told = await prober.check(bench.engine)
    await prober.close()
    assert told is not None
    assert problem in told
    assert len(told) < 300
    assert bench.engine.identity is None


async def test_an_engine_that_hangs_is_given_up_after_the_deadline(bench: Bench) -> None:
    bench.fake.hang = True
    prober = bench.prober(timeout_s=0.05)
    told = await prober.check(bench.engine)
    await prober.close()
    assert told == "/health does not answer within 0.05 s"


async def test_the_start_does_not_wait_for_an_engine_that_hangs(bench: Bench) -> None:
    bench.fake.hang_completion = True
    prober = bench.prober(timeout_s=0.05)
    async with asyncio.timeout(5):
        await first_probe(prober, bench.engine)
    assert bench.engine.identity is None
    bench.fake.may_complete.set()
    await until(lambda: bench.engine.identity is not None)
    await prober.close()


async def test_an_answer_without_end_is_not_read_to_its_end(bench: Bench) -> None:
    bench.fake.params = None
    bench.fake.metrics = "x" * (5 << 20)
    prober = bench.prober()
    await first_probe(prober, bench.engine)
    await prober.close()
    assert bench.engine.identity is not None
    assert bench.engine.identity.block_tokens is None


async def test_with_one_model_named_others_are_not_served(bench: Bench) -> None:
    prober = bench.prober(model="lora")
    await first_probe(prober, bench.engine)
    assert bench.pool.models() == ("lora",)
    await prober.close()
    prober = bench.prober(model="gpt")
    bench.pool.leave(bench.engine)
    assert await prober.check(bench.engine) == "it serves m, lora, not --model gpt"
    await prober.close()


async def test_the_probe_names_the_model_it_serves(bench: Bench) -> None:
    prober = bench.prober(model="lora")
    await first_probe(prober, bench.engine)
    await prober.close()
    assert json.dumps(bench.fake.probes[0]["model"]) == '"lora"'


@pytest.mark.parametrize("takes", [True, False])
async def test_a_prefill_engine_is_asked_whether_it_takes_a_priority(
    bench: Bench, takes: bool
) -> None:
    bench.fake.takes_priority = takes
    engine = bench.pool.assign(bench.engine.address, Role.PREFILL)
    prober = bench.prober(try_priority=True)
    await first_probe(prober, engine)
    await prober.close()
    assert engine.identity is not None
    assert engine.identity.takes_priority is takes
    assert engine.identity.manifest == "cd" * 32
    assert [probe.get("priority") for probe in bench.fake.probes] == [1] if takes else [1, None]


@pytest.mark.parametrize(("role", "asks"), [(Role.DECODE, True), (Role.PREFILL, False)])
async def test_an_engine_that_will_get_no_priority_is_not_asked_for_one(
    bench: Bench, role: Role, asks: bool
) -> None:
    engine = bench.pool.assign(bench.engine.address, role)
    prober = bench.prober(try_priority=asks)
    await first_probe(prober, engine)
    await prober.close()
    assert engine.identity is not None
    assert not engine.identity.takes_priority
    assert [probe.get("priority") for probe in bench.fake.probes] == [None]


async def test_an_adapter_that_is_loaded_or_unloaded_later_is_noticed(bench: Bench) -> None:
    prober = bench.prober()
    await first_probe(prober, bench.engine)
    bench.fake.models.append({"id": "late", "root": "/adapters/late", "parent": "m"})
    assert await prober.check(bench.engine) is None
    assert bench.pool.models() == ("m", "lora", "late")
    assert bench.engine.identity is not None
    assert bench.engine.identity.adapter("late") == ("late", "/adapters/late")
    assert [e.address for e in bench.pool.engines(Role.DECODE, "late")] == [bench.engine.address]
    del bench.fake.models[1]
    assert await prober.check(bench.engine) is None
    assert bench.pool.models() == ("m", "late")
    assert bench.pool.engines(Role.DECODE, "lora") == ()
    await prober.close()


async def test_an_adapter_that_is_reloaded_from_another_path_names_its_blocks_otherwise(
    bench: Bench,
) -> None:
    prober = bench.prober()
    await first_probe(prober, bench.engine)
    bench.fake.models[1]["root"] = "/adapters/l2"
    assert await prober.check(bench.engine) is None
    await prober.close()
    assert bench.engine.identity is not None
    assert bench.engine.identity.adapter("lora") == ("lora", "/adapters/l2")


async def test_an_engine_that_serves_other_models_is_not_taken_for_a_new_one(bench: Bench) -> None:
    told: list[str] = []
    bench.pool.on_join(lambda _: told.append("joined"))
    bench.pool.on_leave(lambda _: told.append("left"))
    prober = bench.prober()
    await first_probe(prober, bench.engine)
    bench.fake.models.append({"id": "late", "root": "/adapters/late", "parent": "m"})
    assert await prober.check(bench.engine) is None
    await prober.close()
    assert told == ["joined"]
    assert (bench.engine.joins, len(bench.fake.probes)) == (1, 1)


async def test_an_engine_that_no_longer_serves_the_one_model_leaves(bench: Bench) -> None:
    prober = bench.prober(model="lora")
    await first_probe(prober, bench.engine)
    del bench.fake.models[1]
    await until(lambda: bench.engine.identity is None)
    assert prober.problem(bench.engine) == "it serves m, not --model lora"
    await prober.close()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b'{"data": []}',
        b'{"data": [{"id": "\xff"}]}',
        b'{"data": [{"id": "m", "max_model_len": 1e999}]}',
        b'{"data": [{"id": "m", "more": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]}",
    ],
    ids=["empty", "html", "no model", "bytes", "infinite", "deep"],
)
def test_a_list_of_models_that_cannot_be_read_fails_the_probe_in_a_sentence(body: bytes) -> None:
    with pytest.raises(ProbeFailed, match="/v1/models"):
        read_models(body)


def listing(*paths: str) -> dict[str, Any]:
    """An OpenAPI document of these paths."""
    return {"openapi": "3.1.0", "paths": {path: {} for path in ("/health", *paths)}}


async def test_an_engine_that_lists_no_generation_joins_without_being_asked_for_a_token(
    bench: Bench,
) -> None:
    bench.fake.openapi = listing("/v1/embeddings", "/v1/score", "/tokenize", "/pooling")
    prober = bench.prober()
    await first_probe(prober, bench.engine)
    await prober.close()
    identity = bench.engine.identity
    assert identity is not None
    assert not identity.generates
    assert identity.endpoints == frozenset(("/v1/embeddings", "/v1/score", "/tokenize"))
    assert (identity.domain, identity.manifest, bench.fake.probes) == (None, None, [])
    assert bench.pool.engines(Role.DECODE) == ()
    assert bench.pool.serving("/v1/embeddings", "m") == (bench.engine,)
    assert bench.pool.serving("/v1/rerank", "m") == ()


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (400, "The model does not support Completions API"),
        (404, "Not Found"),
        (501, "The model does not support Completions API"),
    ],
)
async def test_an_engine_that_refuses_completions_as_such_joins_for_the_other_endpoints(
    bench: Bench, status: int, message: str
) -> None:
    bench.fake.completion_status, bench.fake.completion_error = status, message
    prober = bench.prober()
    assert await prober.check(bench.engine) is None
    await prober.close()
    assert bench.pool.engines(Role.DECODE) == ()
    assert bench.pool.serving("/v1/responses") == ()
    assert bench.pool.serving("/v1/embeddings") == (bench.engine,)


@pytest.mark.parametrize("page", ["/openapi.json", "/metrics"])
async def test_an_engine_too_busy_to_say_what_it_is_joins_once_it_has_said_it(
    bench: Bench, page: str
) -> None:
    bench.fake.silent.add(page)
    bench.fake.openapi = listing("/v1/completions", "/v1/chat/completions")
    prober = bench.prober(timeout_s=0.2)
    problem = await prober.check(bench.engine)
    assert problem is not None
    assert page in problem
    assert bench.engine.identity is None
    bench.fake.silent.clear()
    assert await prober.check(bench.engine) is None
    await prober.close()
    assert bench.pool.serving("/score", "m") == ()


@pytest.mark.parametrize("document", [None, 500, [], {"paths": 1}, listing("/{path:path}")])
async def test_an_engine_that_does_not_list_its_endpoints_is_taken_to_have_them_all(
    bench: Bench, document: Any
) -> None:
    bench.fake.openapi = document
    prober = bench.prober()
    assert await prober.check(bench.engine) is None
    await prober.close()
    assert bench.engine.identity is not None
    assert bench.engine.identity.endpoints is None
    assert bench.pool.engines(Role.DECODE) == bench.pool.serving("/score") == (bench.engine,)
