"""What the router tells of each model, pool and key, through a whole router."""

import asyncio

from tests.fakes.engine import FakeEngine
from tests.integration.router.conftest import Open, metric, text, until
from tests.integration.router.test_passthrough import offer

from kvrouter.http.headers import SSE_HEADERS
from kvrouter.http.server.exchange import Exchange
from kvrouter.openai.endpoints import RESPONSES


def two_models(engines: list[FakeEngine]) -> None:
    engines[1].model = "other-model"


async def test_requests_are_counted_and_timed_for_their_model(site: Open) -> None:
    here = await site(0, 2, prepare=two_models)
    for model, times in (("m", 1), ("other-model", 2)):
        for _ in range(times):
            assert (await here.post(text(model=model, stream=True)))[0] == 200
    for name, each in (
        ("request_success_total", 1),
        ("generation_tokens_total", 4),
        ("time_to_first_token_seconds_count", 1),
        ("e2e_request_latency_seconds_count", 1),
    ):
        label = 'finished_reason="length",model' if name == "request_success_total" else "model"
        assert await metric(here, f'kvrouter:{name}{{{label}="m"}}') == each, name
        assert await metric(here, f'kvrouter:{name}{{{label}="other-model"}}') == 2 * each, name


async def test_times_between_events_are_those_of_the_model(site: Open) -> None:
    here, seen = await site(0, 2, prepare=two_models), asyncio.Event()

    async def page(exchange: Exchange) -> None:
        exchange.start(200, SSE_HEADERS)
        exchange.write(b"data: 1\n\n")
        await seen.wait()
        exchange.write(b"data: 2\n\n")
        exchange.end()

    offer(here.decode, page, RESPONSES)
    body = {"model": "other-model", "input": "a", "stream": True}
    async with here.http.post(here.url(RESPONSES), json=body) as answer:
        assert await answer.content.readline() == b"data: 1\n"
        seen.set()
        await answer.read()
    name = "kvrouter:inter_token_latency_seconds_count"
    assert await metric(here, f'{name}{{model="other-model"}}') == 1
    assert await metric(here, f'{name}{{model="m"}}') == 0


async def test_a_model_that_no_engine_serves_makes_no_series(site: Open) -> None:
    here = await site()
    for number in range(3):
        assert (await here.post(text(model=f"made-up-{number}")))[0] == 404
    page = (await here.get("/metrics"))[1].decode()
    assert "made-up" not in page
    assert 'kvrouter:request_errors_total{code="404",model=""} 3.0' in page


async def test_the_time_in_the_queue_is_that_of_the_model(site: Open) -> None:
    here = await site(max_concurrent_requests=1)
    here.prefill[0].mode = "held"
    tasks = [asyncio.create_task(here.post(text())) for _ in range(2)]
    await until(lambda: here.app.core.queue_wait.waiting == 1)
    tasks.append(asyncio.create_task(here.post(text(model="made-up"))))
    await until(lambda: here.app.core.queue_wait.waiting == 2)
    here.prefill[0].go.set()
    assert sorted([(await task)[0] for task in tasks]) == [200, 200, 404]
    for model in ("m", ""):
        row = f'kvrouter:request_queue_time_seconds_count{{model="{model}"}}'
        assert await metric(here, row) == 1
