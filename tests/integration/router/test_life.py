"""Engines that freeze or hang: simulated ones, behind links that can be stalled."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from tests.fakes.link import Link
from tests.fakes.patience import until

from kvrouter.app.build import App, build
from kvrouter.app.settings import RouterSettings
from kvrouter.engines.breaker import BreakerState
from kvrouter.engines.engine import Engine
from kvrouter.tools.sim.serve import SimServer
from kvrouter.tools.sim.settings import SimSettings

Json = dict[str, Any]
SOON: Json = {"health_interval_s": 0.05, "health_timeout_s": 0.5, "engine_stall_timeout_s": 2.0}
COMPLETIONS, TOKENIZE = "/v1/completions", "/tokenize"


@dataclass
class Fleet:
    """A router before simulated engines, each behind its link."""

    app: App
    port: int
    sims: list[SimServer]
    links: list[Link]
    http: aiohttp.ClientSession

    def engine(self, at: int) -> Engine:
        found = self.app.core.pool.find(self.links[at].url.removeprefix("kv://"))
        assert found is not None
        return found

    async def ask(self, path: str = COMPLETIONS, **more: Any) -> tuple[int, str]:
        body = {"model": "tiny", "prompt": list(range(50)), "max_tokens": 60, **more}
        async with self.http.post(f"http://127.0.0.1:{self.port}{path}", json=body) as answer:
            return answer.status, await answer.text()

    async def busy(self, *, begun: bool = False) -> int:
        """Which engine has a leg; `begun`: and has generated some of its answer."""

        def generating() -> list[int]:
            return [
                at
                for at, sim in enumerate(self.sims)
                if self.engine(at).requests and (not begun or tokens_between(sim))
            ]

        await until(generating)
        return generating()[0]

    async def metric(self, line: str) -> float:
        async with self.http.get(f"http://127.0.0.1:{self.port}/metrics") as answer:
            rows = [r for r in (await answer.text()).splitlines() if r.startswith(line)]
        return sum(float(row.rsplit(" ", 1)[1]) for row in rows)

    async def problem(self, at: int) -> str:
        async with self.http.get(f"http://127.0.0.1:{self.port}/workers") as answer:
            return str((await answer.json())["workers"][at]["problem"])


def tokens_between(sim: SimServer) -> bool:
    """Whether any of its answers has had a second token."""
    page = sim.engine.metrics.exposition().splitlines()
    name = b"vllm:inter_token_latency_seconds_count"
    return not next(row for row in page if row.startswith(name)).endswith(b" 0.0")


Open = Callable[..., Awaitable[Fleet]]


@pytest_asyncio.fixture
async def fleet() -> AsyncIterator[Open]:
    opened: list[Fleet] = []

    async def open_fleet(count: int = 2, sim: Json | None = None, **settings: Any) -> Fleet:
        made = SimSettings(
            model="tiny", port=0, block_size=16, **{"inter_token_latency": "10ms", **(sim or {})}
        )
        sims = [SimServer(made) for _ in range(count)]
        links = [Link(("127.0.0.1", await sim.start())).start() for sim in sims]
        addresses = [link.url.removeprefix("kv://") for link in links]
        both = {"policy": "round_robin", "engine_wait_s": 0.0, "admin": True, "port": 0}
        app = build(RouterSettings(decode=addresses, **{**both, **SOON, **settings}))
        here = Fleet(app, await app.start(), sims, links, aiohttp.ClientSession())
        opened.append(here)
        await until(lambda: all(engine.identity for engine in app.core.pool.all()))
        return here

    yield open_fleet
    for here in opened:
        await here.http.close()
        await here.app.close()
        engines = here.app.core.pool.all()
        assert all(e.legs == e.requests == e.prefills == e.tokens == 0 for e in engines)
        for link in here.links:
            await asyncio.to_thread(link.close)
        for sim in here.sims:
            sim.engine.core.set()
            await sim.close()


def whole(status: int, text: str) -> None:
    assert status == 200, text
    assert all(c["finish_reason"] == "length" for c in json.loads(text)["choices"])


async def test_whole_answers_of_a_frozen_engine_come_from_another(fleet: Open) -> None:
    here = await fleet()
    tasks = [asyncio.create_task(here.ask(n=n)) for n in (1, 1, 1, 2)]
    at = await here.busy()
    here.links[at].stall()
    for task in tasks:
        whole(*await task)
    engine = here.engine(at)
    assert engine.identity is None
    assert await here.metric('kvrouter:engines_left_total{cause="silent"}') == 1
    assert "no sign of life" in await here.problem(at)
    here.links[at].resume()
    await until(lambda: engine.identity is not None)
    assert here.app.core.pool.state(engine) is BreakerState.CLOSED
    for _ in range(2):
        whole(*await here.ask())
    assert await here.metric("kvrouter:upstream_errors_total") == await here.metric(
        'kvrouter:upstream_errors_total{leg="decode",reason="dead"}'
    )


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("choices", [1, 2])
async def test_a_stream_of_a_frozen_engine_ends_or_goes_on(
    fleet: Open, choices: int, resumes: bool
) -> None:
    here = await fleet(resume_streams=resumes)
    prompts = [list(range(at, at + 50)) for at in range(choices)]
    task = asyncio.create_task(here.ask(stream=True, temperature=0, prompt=prompts))
    at = await here.busy(begun=True)
    here.links[at].stall()
    status, text = await task
    assert status == 200
    assert text.endswith("data: [DONE]\n\n")
    assert ('"error"' in text) is not resumes
    assert (text.count('"finish_reason":"length"') == choices) is resumes


async def test_a_passed_request_to_a_frozen_engine_goes_to_another(fleet: Open) -> None:
    here = await fleet()
    for link in here.links[:1]:
        link.stall()
    answers = await asyncio.gather(*(here.ask(TOKENIZE, prompt="Hello") for _ in range(4)))
    assert [status for status, _ in answers] == [200] * 4


async def test_an_engine_that_serves_stays_though_its_checks_are_not_answered(fleet: Open) -> None:
    here = await fleet(1)
    path = "/health"

    async def busy(*_: object) -> None:
        await asyncio.Event().wait()

    served = here.sims[0].http
    handle = served.handler

    async def slow(exchange: Any) -> None:
        await (busy() if exchange.path == path else handle(exchange))

    served.handler = slow
    for _ in range(12):
        whole(*await here.ask(max_tokens=20))
    assert here.app.members.prober.lives.pulse(here.engine(0)).missed >= 2
    assert here.engine(0).joins == 1


async def test_a_core_that_hangs_behind_a_server_that_answers_is_found(fleet: Open) -> None:
    here = await fleet()
    stream = asyncio.create_task(here.ask(stream=True))
    at = await here.busy(begun=True)
    here.sims[at].engine.core.clear()
    others = [asyncio.create_task(here.ask()) for _ in range(4)]
    status, text = await stream
    assert status == 200
    assert '"error"' in text
    for task in others:
        whole(*await task)
    assert await here.metric('kvrouter:engines_left_total{cause="stalled"}') == 1
    assert "its streams have got nothing" in await here.problem(at)


async def test_an_engine_that_stalled_joins_again_when_its_core_computes(fleet: Open) -> None:
    here = await fleet()
    stream = asyncio.create_task(here.ask(stream=True))
    at = await here.busy(begun=True)
    core, engine = here.sims[at].engine.core, here.engine(at)
    core.clear()
    await stream
    await until(lambda: here.sims[at].engine.running)  # it is tried
    assert engine.identity is None
    core.set()
    await until(lambda: engine.identity is not None)
    assert await here.problem(at) == "None"
    for _ in range(2):
        whole(*await here.ask())


async def test_legs_of_an_engine_that_is_back_at_once_end_all_the_same(fleet: Open) -> None:
    here = await fleet()
    stream = asyncio.create_task(here.ask(stream=True, max_tokens=1000))
    at = await here.busy(begun=True)
    engine = here.engine(at)
    here.links[at].stall()
    await until(lambda: engine.identity is None)
    here.links[at].resume()
    assert '"error"' in (await stream)[1]
    await until(lambda: engine.identity is not None)
    for _ in range(2):
        whole(*await here.ask())


async def test_the_last_engine_of_a_model_stays_though_it_stalls(
    fleet: Open, caplog: pytest.LogCaptureFixture
) -> None:
    here = await fleet(1)
    stream = asyncio.create_task(here.ask(stream=True))
    at = await here.busy(begun=True)
    here.sims[at].engine.core.clear()
    await until(lambda: "stays, as the last of its model" in caplog.text)
    here.sims[at].engine.core.set()
    status, text = await stream
    assert status == 200
    assert '"error"' not in text
    assert here.engine(0).joins == 1


async def test_a_prefill_that_is_silent_for_long_is_no_fault(fleet: Open) -> None:
    here = await fleet(sim={"time_to_first_token": "4s"})
    answers = await asyncio.gather(
        *(here.ask(stream=bool(at % 2), max_tokens=2) for at in range(4))
    )
    assert [status for status, _ in answers] == [200] * 4
    assert [here.engine(at).joins for at in (0, 1)] == [1, 1]
