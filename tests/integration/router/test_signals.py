"""What the router tells of each model, pool and key, through a whole router."""

import asyncio
import json
from pathlib import Path

import pytest
from tests.fakes.engine import FakeEngine
from tests.fakes.patience import until
from tests.integration.router.conftest import Json, Open, Site, chat, metric, text
from tests.integration.router.test_keys import Keys
from tests.integration.router.test_passthrough import offer, saying
from tests.integration.router.test_usage import USAGE

from kvrouter.http.headers import SSE_HEADERS
from kvrouter.http.server.exchange import Exchange
from kvrouter.openai.endpoints import MESSAGES, RESPONSES


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


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
        exchange.write(b"event: response.output_text.delta\ndata: 1\n\n")
        await seen.wait()
        exchange.write(b"event: response.output_text.delta\ndata: 2\n\n")
        exchange.end()

    offer(here.decode, page, RESPONSES)
    body = {"model": "other-model", "input": "a", "stream": True}
    async with here.http.post(here.url(RESPONSES), json=body) as answer:
        assert await answer.content.readline() == b"event: response.output_text.delta\n"
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


KEY = 'key="a",model="m"'


async def used(here: Site) -> tuple[float, float, float]:
    """Prompt, cached and generated tokens of the key `a` and the model `m`."""
    await until(lambda: here.app.core.metrics.running == 0)
    prompt, cached, generated = [
        await metric(here, f"kvrouter:key_{kind}_tokens_total{{{KEY}}}")
        for kind in ("prompt", "cached", "generation")
    ]
    return prompt, cached, generated


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"stream": True, **USAGE}])
async def test_a_key_has_used_what_engines_counted(site: Open, keys: Keys, more: Json) -> None:
    here = await site(api_key_file=keys.write(a="", b=""))
    here.prefill[0].cached_tokens, here.decode[0].cached_tokens = 5, 15
    body = text(**more)
    assert (await here.post(body, **keys.bearer("a")))[0] == 200
    assert await used(here) == (len(body["prompt"]), 5, 4)
    page = (await here.get("/metrics"))[1].decode()
    assert 'key_prompt_tokens_total{key="b",model="m"} 0.0' in page  # rates need their zero


async def test_a_key_has_used_what_a_single_engine_counted(site: Open, keys: Keys) -> None:
    here = await site(0, 1, api_key_file=keys.write(a=""))
    here.decode[0].cached_tokens = 3
    for more in ({}, {"stream": True, **USAGE}):
        assert (await here.post(text(**more), **keys.bearer("a")))[0] == 200
    assert await used(here) == (2 * len(text()["prompt"]), 6, 8)


@pytest.mark.parametrize("mode", ["drop_mid", "hang_mid"])
async def test_a_key_has_used_what_was_sent_of_an_answer_that_broke_off(
    site: Open, keys: Keys, mode: str
) -> None:
    here = await site(api_key_file=keys.write(a=""))
    here.decode[0].mode = mode
    body = text(stream=True)
    async with here.http.post(
        here.url("/v1/completions"), json=body, headers=keys.bearer("a")
    ) as answer:
        got = b""
        while got.count(b'"text"') < 2:
            got += await answer.content.readany()
    assert await used(here) == (len(body["prompt"]), 0, 2)


async def test_a_key_has_used_nothing_of_what_was_not_answered(site: Open, keys: Keys) -> None:
    here = await site(0, 1, api_key_file=keys.write(a=""))
    here.decode[0].mode = "500"
    assert (await here.post(text(), **keys.bearer("a")))[0] == 500
    assert (await here.post(text(n=0), **keys.bearer("a")))[0] == 400
    assert await used(here) == (0, 0, 0)


async def test_an_answer_of_which_one_part_failed_is_used_by_nobody(site: Open, keys: Keys) -> None:
    here = await site(0, 1, api_key_file=keys.write(a=""))
    held = here.decode[0]
    status, _, _ = await here.post(
        text(prompt=["Hello", "Good bye"], temperature=3), **keys.bearer("a")
    )
    assert (status, len(held.requests)) == (400, 2)
    assert await used(here) == (0, 0, 0)


async def test_a_tools_input_is_no_usage(site: Open, keys: Keys) -> None:
    here = await site(api_key_file=keys.write(a=""))
    faked = {"cached_tokens": 999, "input_tokens": 1, "output_tokens": 1}
    told = {
        "content": [{"type": "tool_use", "input": faked}],
        "usage": {"input_tokens": 7, "output_tokens": 3},
    }
    offer(here.decode, saying(200, told), MESSAGES)
    asked = {"model": "m", "messages": [], "max_tokens": 3}
    assert (await here.post(asked, MESSAGES, **keys.bearer("a")))[0] == 200
    assert await used(here) == (7, 0, 3)


async def test_each_prompt_of_a_request_counts_once_for_its_key(site: Open, keys: Keys) -> None:
    here = await site(kv_connector="nixl", api_key_file=keys.write(a=""))
    body = text(prompt=["Hello", "Good bye"], n=2)
    status, _, answer = await here.post(body, **keys.bearer("a"))
    assert status == 200
    assert len(json.loads(answer)["choices"]) == 4
    assert await used(here) == (len("HelloGood bye"), 0, 16)


async def test_a_key_has_used_what_other_endpoints_say(site: Open, keys: Keys) -> None:
    here = await site(api_key_file=keys.write(a=""))
    offer(here.decode, saying(200, {"usage": {"prompt_tokens": 9, "total_tokens": 9}}))
    asked = {"model": "m", "input": "a"}
    assert (await here.post(asked, "/v1/embeddings", **keys.bearer("a")))[0] == 200
    told = {"input_tokens": 7, "input_tokens_details": {"cached_tokens": 2}, "output_tokens": 3}
    offer(here.decode, saying(200, {"usage": told}), RESPONSES)
    assert (await here.post(asked, RESPONSES, **keys.bearer("a")))[0] == 200
    offer(here.decode, saying(200, {"tokens": [1]}), "/tokenize")
    assert (await here.post(asked, "/tokenize", **keys.bearer("a")))[0] == 200
    assert await used(here) == (16, 2, 3)


async def test_without_keys_nobody_has_used_anything(site: Open) -> None:
    here = await site()
    assert (await here.post(text()))[0] == 200
    page = (await here.get("/metrics"))[1].decode()
    assert "key_prompt_tokens_total{" not in page
    assert 'kvrouter:generation_tokens_total{model="m"} 4.0' in page


async def test_engines_are_counted_by_what_spoke_for_them(site: Open) -> None:
    here = await site(0, 3, policy="prefix", health_interval_s=60.0)
    session = {"x-session-id": "s"}
    talk = "a long message " * 200
    for by in ("session", "learnt"):
        body = chat(messages=[{"role": "user", "content": talk}])
        before = here.app.core.metrics.chosen[by]
        assert (await here.post(body, "/v1/chat/completions", **session))[0] == 200
        assert here.app.core.metrics.chosen[by] == before + 1
    offer(here.decode, saying(200, {"answer": 1}), "/tokenize")
    assert (await here.post({"model": "m", "prompt": "a"}, "/tokenize"))[0] == 200
    assert dict(here.app.core.metrics.chosen) == {"session": 1, "learnt": 1, "load": 1}


async def test_load_is_told_of_models_before_their_first_request(site: Open) -> None:
    here = await site(0, 2, prepare=two_models)
    for model in ("m", "other-model"):
        row = f'kvrouter:prompt_tokens_total{{model="{model}"}} 0.0'
        assert row in (await here.get("/metrics"))[1].decode()


async def test_a_request_in_flight_and_one_that_waits_are_those_of_their_model(site: Open) -> None:
    here = await site(max_concurrent_requests=1)
    here.prefill[0].mode = "held"
    tasks = [asyncio.create_task(here.post(text()))]
    await here.prefill[0].next_began()
    tasks.append(asyncio.create_task(here.post(text())))
    await until(lambda: here.app.core.queue_wait.waiting == 1)
    decode = here.decode[0].address
    expected = {
        'model_requests{model="m"}': 1,
        'model_waiting{model="m"}': 1,
        'pool_requests{role="prefill"}': 1,
        'pool_waiting{role="decode"}': 2,  # that request, and the leg of the first one
        f'worker_waiting{{engine="{decode}"}}': 1,
    }
    found = {row: await metric(here, f"kvrouter:{row}") for row in expected}
    here.prefill[0].go.set()
    assert [(await task)[0] for task in tasks] == [200, 200]
    assert found == expected
    await until(lambda: here.app.core.metrics.running == 0)
    assert {row: await metric(here, f"kvrouter:{row}") for row in expected} == dict.fromkeys(
        expected, 0
    )


async def test_a_request_that_found_no_room_is_an_error_of_its_model(site: Open) -> None:
    here = await site(max_concurrent_requests=1, queue_size=0)
    here.prefill[0].mode = "held"
    task = asyncio.create_task(here.post(text()))
    await here.prefill[0].next_began()
    assert (await here.post(text()))[0] == 429
    here.prefill[0].go.set()
    assert (await task)[0] == 200
    assert await metric(here, 'kvrouter:request_errors_total{code="429",model="m"}') == 1
