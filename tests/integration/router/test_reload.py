"""Settings read anew while requests are under way: each is felt, and nothing is dropped."""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests.fakes.engine import BLOCK_TOKENS, FakeEngine
from tests.fakes.patience import until
from tests.fakes.store import StoreProcess
from tests.integration.router.ahead import MANIFEST
from tests.integration.router.conftest import DEFAULTS, Json, Open, Site, text
from tests.integration.router.test_failures import answering
from tests.integration.router.test_passthrough import offer
from tests.unit.router.admission.test_tenants import request

from kvrouter.app.process import leave
from kvrouter.app.reload import RELOADED, Reload, follow
from kvrouter.app.settings import RouterSettings
from kvrouter.engines.breaker import BreakerLimits, BreakerState
from kvrouter.engines.engine import Identity, Role
from kvrouter.http.server.exchange import Exchange
from kvrouter.options.complaints import UsageError
from kvrouter_store.node.signals import Signals

F = TypeVar("F", bound=Callable[..., Any])
IDS = list(range(100, 100 + 3 * BLOCK_TOKENS + 5))
proven: set[str] = set()


def proves(*names: str) -> Callable[[F], F]:
    """What a test shows to be felt."""
    proven.update(names)
    return lambda test: test


def announce(engines: list[FakeEngine]) -> None:
    for engine in engines:
        engine.manifest = MANIFEST.digest.hex()


def two_models(engines: list[FakeEngine]) -> None:
    engines[1].model = "other"


def change(here: Site, **settings: Any) -> None:
    follow(here.app, here.app.settings.model_copy(update=settings))


async def held(here: Site, **headers: str) -> "asyncio.Task[Any]":
    """A request that the prefill engine holds until `go`."""
    here.prefill[0].mode = "held"
    task = asyncio.create_task(here.post(text(), **headers))
    await here.prefill[0].next_began()
    return task


@proves("max_concurrent_requests")
async def test_a_higher_limit_lets_those_who_wait_begin(site: Open) -> None:
    here = await site(max_concurrent_requests=1)
    first = await held(here)
    second = asyncio.create_task(here.post(text()))
    await until(lambda: here.app.core.queue_wait.waiting == 1)
    change(here, max_concurrent_requests=2)
    await here.prefill[0].next_began()
    assert here.app.core.queue_wait.waiting == 0
    here.prefill[0].go.set()
    assert [(await task)[0] for task in (first, second)] == [200, 200]


async def test_a_lower_limit_cuts_nobody_off(site: Open) -> None:
    here = await site(max_concurrent_requests=2)
    tasks = [await held(here), await held(here)]
    change(here, max_concurrent_requests=1)
    tasks.append(asyncio.create_task(here.post(text())))
    await until(lambda: here.app.core.queue_wait.waiting == 1)
    here.prefill[0].go.set()
    assert [(await task)[0] for task in tasks] == [200] * 3


@proves("queue_size", "queue_timeout_s")
async def test_the_queue_is_as_long_as_it_was_said_last(site: Open) -> None:
    here = await site(max_concurrent_requests=1)
    first = await held(here)
    change(here, queue_size=0)
    assert (await here.post(text()))[0] == 429
    change(here, queue_size=1, queue_timeout_s=0.01)
    assert (await here.post(text()))[0] == 503
    here.prefill[0].go.set()
    assert (await first)[0] == 200


@proves("tenant_header", "trusted_proxies")
async def test_tenants_are_told_apart_by_the_header_named_last(site: Open) -> None:
    here = await site(max_concurrent_requests=1)
    asked = request("127.0.0.1:1", {"x-tenant": "t"})
    assert here.app.core.queue_wait.tenant(asked) == "127.0.0.1"
    change(here, tenant_header="x-tenant", trusted_proxies=["127.0.0.0/8"])
    assert here.app.core.queue_wait.tenant(asked) == "t"
    change(here, trusted_proxies=[])
    assert here.app.core.queue_wait.tenant(asked) == "127.0.0.1"


@proves("admin_token", "admin_token_file")
async def test_the_admin_token_is_the_one_that_was_read_last(site: Open, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("one\n")
    here = await site(admin=True, admin_token_file=str(file), control_port=0)

    control = here.app.ports.control
    assert control is not None
    urls = [f"http://127.0.0.1:{control.port}{path}" for path in ("/workers", "/status.json")]

    async def statuses() -> list[int]:
        found = []
        for url in urls:
            for token in ("one", "two"):
                headers = {"authorization": f"Bearer {token}"}
                async with here.http.get(url, headers=headers) as answer:
                    found.append(answer.status)
        return found

    assert await statuses() == [200, 401, 200, 401]
    file.write_text("two\n")
    named = {"prefill": [here.prefill[0].address], "decode": [here.decode[0].address]}
    again = {**named, **DEFAULTS, "admin": True, "admin_token_file": str(file), "port": 0}
    follow(here.app, RouterSettings(**again, control_port=0))
    assert await statuses() == [401, 200, 401, 200]


@proves("engine_wait_s")
async def test_requests_wait_for_an_engine_as_long_as_was_said_last(site: Open) -> None:
    here = await site(0, 1)
    (engine,) = here.app.core.pool.engines(Role.DECODE)
    assert (await here.post(text()))[0] == 200
    change(here, engine_wait_s=30)
    assert here.app.members.fleet.remove(engine)
    task = asyncio.create_task(here.post(text()))
    await until(lambda: here.app.core.engine_wait.waiting == 1)
    here.app.members.fleet.add(engine.address, Role.BOTH)
    assert (await task)[0] == 200


@proves("model_alias")
async def test_aliases_stand_for_the_models_that_were_named_last(site: Open) -> None:
    here = await site(0, 2, prepare=two_models)
    assert (await here.post(text(model="alias")))[0] == 404
    for model, engine in (("m", here.decode[0]), ("other", here.decode[1])):
        change(here, model_alias=[f"alias={model}"])
        assert (await here.post(text(model="alias")))[0] == 200
        assert [body["model"] for body in engine.requests] == [model]


@proves("model_max_concurrent_requests")
async def test_a_model_has_as_many_requests_in_flight_as_was_said_last(site: Open) -> None:
    here = await site()
    change(here, model_max_concurrent_requests=["m=1"])
    first = await held(here)
    second = asyncio.create_task(here.post(text()))
    await until(lambda: here.app.core.gates.waiting == 1)
    change(here, model_max_concurrent_requests=["m=2"])
    await here.prefill[0].next_began()
    here.prefill[0].go.set()
    assert [(await task)[0] for task in (first, second)] == [200, 200]


@proves("model_prefill_threshold")
async def test_a_model_skips_the_prefill_leg_from_its_threshold_said_last(site: Open) -> None:
    here = await site(policy="prefix")
    change(here, model_prefill_threshold=["m=10000"])
    assert (await here.post(text()))[0] == 200
    assert here.prefill[0].requests == []
    change(here, model_prefill_threshold=[])
    assert (await here.post(text()))[0] == 200
    assert len(here.prefill[0].requests) == 1


@proves("model_retention_s")
async def test_models_of_engines_that_left_are_known_as_long_as_was_said_last(site: Open) -> None:
    here = await site(0, 2, prepare=two_models)
    await here.decode[0].stop()
    (engine,) = [e for e in here.app.core.pool.all() if e.address == here.decode[0].address]
    await until(lambda: engine.identity is None)
    assert (await here.post(text()))[0] == 503
    change(here, model_retention_s=0)
    assert (await here.post(text()))[0] == 404


@proves("recompute_budget_tokens", "landing_timeout_s")
async def test_budget_and_landing_time_are_those_said_last(site: Open, node: StoreProcess) -> None:
    here = await site(store=node.url, landing_timeout_s=60, prepare=announce)
    change(here, landing_timeout_s=0.01, recompute_budget_tokens=0)
    assert (await here.post(text(prompt=IDS)))[0] == 429
    change(here, recompute_budget_tokens=1000)
    assert (await here.post(text(prompt=IDS)))[0] == 200


@proves("max_predicted_ttft_s")
async def test_prompts_are_refused_from_the_wait_on_that_was_said_last(site: Open) -> None:
    here = await site(policy="planner", prefill_threshold=0)
    here.prefill[0].mode = "held"
    prompt = text(prompt=list(range(5000)))
    first = asyncio.create_task(here.post(prompt))
    await here.prefill[0].next_began()
    change(here, max_predicted_ttft_s=0.001)
    assert (await here.post(prompt))[0] == 429
    here.prefill[0].go.set()
    assert (await first)[0] == 200


@proves("store")
async def test_a_node_of_the_store_is_asked_once_it_is_named(
    site: Open, node: StoreProcess, caplog: pytest.LogCaptureFixture
) -> None:
    here = await site(store="kv://127.0.0.1:1", prepare=announce)
    change(here, store=["kv://127.0.0.1:1", node.url])
    nodes = here.app.core.nodes
    await until(lambda: nodes is not None and nodes.away == ["kv://127.0.0.1:1"])
    change(here, store=[node.url])
    assert nodes is not None
    assert nodes.away == []
    for unlike in ([], ["mooncake://127.0.0.1:1"]):
        change(here, store=unlike)
        assert len(nodes.clients) == 1
    assert caplog.text.count("--store: changed, but takes effect at the next start only") == 2


@proves("prefill_threshold")
async def test_the_prefill_leg_is_skipped_from_the_threshold_said_last(site: Open) -> None:
    here = await site(policy="prefix")
    assert (await here.post(text()))[0] == 200
    assert len(here.prefill[0].requests) == 1
    change(here, prefill_threshold=10_000)
    assert (await here.post(text()))[0] == 200
    assert len(here.prefill[0].requests) == 1


@proves("max_choices")
async def test_so_many_choices_are_taken_as_was_said_last(site: Open) -> None:
    here = await site()
    change(here, max_choices=1)
    assert (await here.post(text(n=2)))[0] == 400
    change(here, max_choices=2)
    assert (await here.post(text(n=2)))[0] == 200


@proves("health_interval_s", "health_timeout_s")
async def test_engines_are_asked_at_the_pace_said_last(site: Open) -> None:
    here = await site(0, 1, health_interval_s=0.02, health_timeout_s=60.0)
    change(here, health_timeout_s=0.05)
    here.decode[0].healthy.clear()
    await until(lambda: not here.app.core.pool.engines(Role.DECODE))
    change(here, health_interval_s=0.01)
    here.decode[0].healthy.set()
    await until(lambda: bool(here.app.core.pool.engines(Role.DECODE)))
    assert here.app.members.prober.interval_s == 0.01


@proves("health_failure_threshold")
async def test_an_engine_leaves_after_as_many_failed_checks_as_were_said_last(site: Open) -> None:
    here = await site(0, 1, health_interval_s=0.01, health_failure_threshold=10**6)
    (engine,) = here.app.core.pool.engines(Role.DECODE)
    prober, fake = here.app.members.prober, here.decode[0]
    fake.key = "another"  # its pages answer 401 from now on
    asked = len(fake.asked)
    await until(lambda: prober.problem(engine) is not None and len(fake.asked) > asked + 5)
    assert engine.identity is not None
    change(here, health_failure_threshold=1)
    await until(lambda: engine.identity is None)


@proves("engine_stall_timeout_s")
async def test_an_engine_may_stall_as_long_as_was_said_last(site: Open) -> None:
    here = await site(0, 2, engine_stall_timeout_s=600.0, cb_failure_threshold=100)
    for fake in here.decode:
        fake.mode = "hang_mid"
        fake.pages["/metrics"] = still
    asked = asyncio.create_task(here.post(text(stream=True)))
    engines = here.app.core.pool.engines(Role.DECODE)
    await until(lambda: any(here.app.members.prober.lives.progress(e).counts for e in engines))
    change(here, engine_stall_timeout_s=0.2)
    assert b'"error"' in (await asked)[2]
    assert here.app.core.metrics.engines_left["stalled"] == 1


async def still(exchange: Exchange) -> None:
    """Counters that stand still."""
    exchange.respond(200, b"vllm:generation_tokens_total 5.0\n", content_type="text/plain")


BAD_GATEWAY = answering(b"", "text/plain", 502)


@proves("retry_max_attempts")
async def test_as_many_engines_are_asked_as_was_said_last(site: Open) -> None:
    here = await site(0, 4, health_interval_s=60.0, cb_failure_threshold=100)
    for engine in here.decode:
        engine.pages["/v1/completions"] = BAD_GATEWAY
    for attempts in (1, 2, 4):
        before = sum(len(engine.posted) for engine in here.decode)
        change(here, retry_max_attempts=attempts)
        assert (await here.post(text()))[0] == 503
        assert sum(len(engine.posted) for engine in here.decode) == before + attempts


@pytest.mark.parametrize(("attempts", "status"), [(1, 429), (2, 200)])
async def test_a_prefill_leg_is_tried_on_as_many_engines_as_was_said(
    site: Open, attempts: int, status: int
) -> None:
    settings = {"recompute_budget_tokens": 0, "retry_max_attempts": attempts}
    here = await site(2, 1, policy="round_robin", health_interval_s=60.0, **settings)
    full = answering(b"{}", "application/json", 429)
    here.prefill[0].pages["/v1/completions"] = here.prefill[1].pages["/v1/completions"] = full
    for engine in here.prefill[1:]:
        del engine.pages["/v1/completions"]
    found = {(await here.post(text()))[0] for _ in range(2)}
    assert found == {200, status}


@pytest.mark.parametrize(("attempts", "asked"), [(1, 1), (3, 3)])
async def test_other_endpoints_are_tried_on_as_many_engines_as_was_said(
    site: Open, attempts: int, asked: int
) -> None:
    here = await site(0, 4, retry_max_attempts=attempts, health_interval_s=60.0)
    offer(here.decode, BAD_GATEWAY)
    assert (await here.post({"model": "m", "input": "a"}, "/v1/embeddings"))[0] == 503
    assert sum(len(engine.posted) for engine in here.decode) == asked


@proves("cb_failure_threshold", "cb_timeout_s", "cb_max_timeout_s")
async def test_breakers_open_after_and_for_as_long_as_was_said_last(site: Open) -> None:
    here = await site(0, 1, retry_max_attempts=1, health_interval_s=60.0, cb_failure_threshold=100)
    (engine,) = here.app.core.pool.engines(Role.DECODE)
    here.decode[0].pages["/v1/completions"] = BAD_GATEWAY
    for _ in range(5):
        await here.post(text())
    assert here.app.core.pool.state(engine) is BreakerState.CLOSED
    change(here, cb_failure_threshold=2, cb_timeout_s=0.01, cb_max_timeout_s=0.01)
    await here.post(text())
    await until(lambda: here.app.core.pool.state(engine) is BreakerState.HALF_OPEN)
    change(here, cb_timeout_s=300.0, cb_max_timeout_s=600.0)
    await here.post(text())
    assert here.app.core.pool.state(engine) is BreakerState.OPEN
    assert here.app.core.pool.breaker_limits == BreakerLimits(2, 300.0, 600.0)


@proves("request_timeout_s")
async def test_engines_have_as_long_to_begin_as_was_said_last(site: Open) -> None:
    here = await site(0, 1, retry_max_attempts=1)
    here.decode[0].mode = "hang"
    change(here, request_timeout_s=0.02)
    assert (await here.post(text()))[0] == 504


@proves("stream_idle_timeout_s")
@pytest.mark.parametrize("settings", [{"stream_idle_timeout_s": 0.02}, {"request_timeout_s": 0.02}])
async def test_engines_may_pause_as_long_as_was_said_last(site: Open, settings: Json) -> None:
    here = await site(0, 1)
    here.decode[0].mode = "hang_mid"
    change(here, **settings)
    status, _, body = await here.post(text(stream=True))
    assert (status, b"broke off" in body) == (200, True)


@proves("sse_keep_alive_interval_s")
async def test_a_silent_client_gets_a_comment_as_soon_as_was_said_last(site: Open) -> None:
    here = await site(0, 1)
    here.decode[0].mode = "held"
    change(here, sse_keep_alive_interval_s=0.02)
    async with here.http.post(here.url("/v1/completions"), json=text(stream=True)) as answer:
        assert await answer.content.readline() == b": keep-alive\n"
        here.decode[0].go.set()


@proves("connect_timeout_s")
async def test_engines_may_take_as_long_to_accept_as_was_said_last(site: Open) -> None:
    here = await site(0, 1, retry_max_attempts=1)
    change(here, connect_timeout_s=0.02)
    pool = here.app.core.pool
    with socket.create_server(("127.0.0.1", 0), backlog=0) as deaf, socket.socket() as first:
        first.connect(deaf.getsockname())  # nobody accepts it: there is no room for another
        engine = pool.add(f"127.0.0.1:{deaf.getsockname()[1]}", Role.DECODE)
        pool.join(engine, Identity(("deaf",)))
        async with asyncio.timeout(3):
            assert (await here.post(text(model="deaf")))[0] == 503
        pool.remove(engine)
    assert here.app.core.metrics.upstream_errors == {("decode", "connect"): 1}


@proves("log_level")
async def test_as_much_is_logged_as_was_said_last(site: Open) -> None:
    here, root = await site(), logging.getLogger()
    before = root.level
    try:
        change(here, log_level="error")
        assert root.level == logging.ERROR
    finally:
        root.setLevel(before)


@proves("drain_delay_s", "drain_timeout_s")
async def test_the_times_of_the_end_are_those_said_last(site: Open) -> None:
    here = await site()
    change(here, drain_delay_s=0.0, drain_timeout_s=30.0)
    task = await held(here)
    signals = Signals()
    signals.leave.set()
    draining = asyncio.create_task(leave(here.app.ports.public, here.app.settings, signals))
    await until(lambda: here.app.ports.public.draining)
    here.prefill[0].go.set()
    assert (await task)[0] == 200
    await draining


async def test_what_takes_effect_at_the_next_start_only_is_named(
    site: Open, caplog: pytest.LogCaptureFixture
) -> None:
    here = await site()
    change(here, policy="least_tokens", session_key="x-chat", queue_size=7)
    (line,) = [r.getMessage() for r in caplog.records if "next start" in r.getMessage()]
    assert "--policy" in line
    assert "--session-key" in line
    assert "--queue-size" not in line


async def test_a_stream_under_way_notices_nothing(site: Open) -> None:
    here = await site()
    here.decode[0].mode = "held"
    task = asyncio.create_task(here.post(text(stream=True)))
    await here.decode[0].next_began()
    change(here, max_concurrent_requests=1, queue_size=0, queue_timeout_s=1.0, max_choices=1)
    here.decode[0].go.set()
    status, _, body = await task
    assert status == 200
    assert body.endswith(b"data: [DONE]\n\n")


async def test_requests_are_served_while_settings_are_read_again(site: Open) -> None:
    here, served, read = await site(), threading.Event(), list[RouterSettings]()

    def reread() -> RouterSettings:
        assert served.wait(20)
        read.append(here.app.settings.model_copy(update={"queue_size": 7 + len(read)}))
        return read[-1]

    reload = Reload(here.app, reread)
    for _ in range(5):
        reload.begin()
    assert (await here.post(text()))[0] == 200
    for _ in range(5):
        reload.begin()
    served.set()
    await until(lambda: here.app.core.engine_wait.size == 8)
    await until(lambda: len(read) == 2)  # one for all signals that came meanwhile
    await reload.close()


async def test_a_reading_that_fails_changes_nothing_and_the_next_one_does(
    site: Open, caplog: pytest.LogCaptureFixture
) -> None:
    here = await site(control_port=0)
    answers: list[RouterSettings | UsageError] = [
        here.app.settings.model_copy(update={"queue_size": 7}),
        UsageError("--queue-size: too small"),
    ]

    def reread() -> RouterSettings:
        answer = answers.pop()
        if isinstance(answer, UsageError):
            raise answer
        return answer

    before, reload = here.app.settings, Reload(here.app, reread)
    reload.begin()
    await until(lambda: "the router keeps its settings: --queue-size: too small" in caplog.text)
    assert here.app.settings is before
    reload.begin()
    await until(lambda: here.app.core.engine_wait.size == 7)
    await reload.close()
    assert here.app.snapshots is not None
    events = here.app.snapshots.snapshot().events[:2]
    assert [(event.kind, event.text) for event in events] == [
        ("reload", "--queue-size"),
        ("reload refused", "the router keeps its settings; its log says why"),
    ]


def test_every_setting_that_reloads_is_proven_here() -> None:
    assert proven == set(RELOADED)
