"""Messages and responses with both legs: the prefill leg is a completion of what engines render."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.fakes.engine import BLOCK_TOKENS, FakeEngine
from tests.fakes.store import StoreProcess
from tests.integration.router.conftest import Json, Open, metric
from tests.integration.router.test_landing import (
    HASHES,
    IDS,
    announce,
    await_stat,
    node,
    store_blocks,
)
from tests.integration.router.test_passthrough import drop, saying, streaming

from kvrouter.http.headers import SSE_HEADERS
from kvrouter.http.server.exchange import Exchange
from kvrouter.openai.endpoints import COMPLETIONS, MESSAGES, RESPONSES
from kvrouter.serving.rendered import RENDERED

__all__ = ["node"]

ASKED = {
    MESSAGES: {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9},
    RESPONSES: {"input": [{"role": "user", "content": "Hello"}], "max_output_tokens": 9},
}
PATHS = pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
BLOCKS = len(IDS) // BLOCK_TOKENS
Page = Callable[[Exchange], Awaitable[None]]
TOO_LONG = {"type": "error", "error": {"type": "invalid_request_error", "message": "too long"}}


def offering(page: Page, rendered: Json | None = None) -> Callable[[list[FakeEngine]], None]:
    """Engines that list and render both; `page` answers, with token ids of `rendered`."""
    answer = saying(200, {"token_ids": IDS, "features": None} if rendered is None else rendered)

    def prepare(made: list[FakeEngine]) -> None:
        announce(made)
        for engine in made:
            engine.endpoints = (COMPLETIONS, *RENDERED, *RENDERED.values())
            engine.pages.update(dict.fromkeys(RENDERED, page))
            engine.pages.update(dict.fromkeys(RENDERED.values(), answer))

    return prepare


def asked(path: str, **more: Any) -> Json:
    return {"model": "m", **ASKED[path], **more}


def posted(engine: FakeEngine, path: str) -> list[Json]:
    return [json.loads(body) for at, body in engine.posted if at == path]


@PATHS
async def test_the_prompt_is_prefilled_as_a_completion_and_landed_before_its_decode_leg(
    site: Open, node: StoreProcess, path: str
) -> None:
    await asyncio.to_thread(store_blocks, node, 0)
    prepare = offering(saying(200, {"usage": {"output_tokens": 5}, "kv_transfer_params": {"x": 1}}))
    here = await site(store=node.url, policy="prefix", landing_timeout_s=30, prepare=prepare)
    task = asyncio.create_task(here.post(asked(path, cache_salt="salt", priority=2), path))
    prefill = await here.prefill[0].next_began()
    assert (prefill["prompt"], prefill["max_tokens"]) == (IDS, 1)
    assert (prefill["cache_salt"], prefill["stream"]) == ("salt", False)
    assert posted(here.decode[0], path) == []
    task.cancel()  # its blocks have other names: nothing that is stored here lands for it
    task = asyncio.create_task(here.post(asked(path), path))
    await here.prefill[0].next_began()
    await asyncio.to_thread(store_blocks, node, BLOCKS)
    status, _, answer = await task
    assert (status, json.loads(answer)) == (200, {"usage": {"output_tokens": 5}})
    [decode] = posted(here.decode[0], path)
    assert decode.pop("kv_transfer_params") == {"prompt_token_ids": IDS}
    assert decode == asked(path)
    assert await metric(here, 'kvrouter:landings_total{outcome="landed"}') == 1
    assert (
        await metric(here, 'kvrouter:request_success_total{finished_reason="unknown",model="m"}')
        == 1
    )
    assert await metric(here, "kvrouter:generation_tokens_total") == 5
    await asyncio.to_thread(await_stat, node, "leases", 0)


@PATHS
async def test_what_the_store_holds_is_loaded_without_a_prefill_leg(
    site: Open, node: StoreProcess, path: str
) -> None:
    await asyncio.to_thread(store_blocks, node, BLOCKS)
    prepare = offering(streaming({"type": "message_stop"}))
    here = await site(store=node.url, policy="prefix", prepare=prepare)
    status, _, answer = await here.post(asked(path, stream=True), path)
    assert (status, answer) == (200, b'event: x\ndata: {"type": "message_stop"}\n\n')
    assert here.prefill[0].requests == []
    held = len(HASHES) // 32 * BLOCK_TOKENS
    assert await metric(here, 'kvrouter:prefix_hit_tokens_total{model="m",source="store"}') == held


async def test_an_answer_that_is_announced_needs_its_prompt_until_its_first_content(
    site: Open, node: StoreProcess
) -> None:
    content = asyncio.Event()

    async def page(exchange: Exchange) -> None:
        exchange.start(200, SSE_HEADERS)
        exchange.write(b"event: response.created\ndata: {}\n\n")
        await content.wait()
        exchange.write(b"event: response.output_text.delta\ndata: {}\n\n")
        exchange.end()

    await asyncio.to_thread(store_blocks, node, BLOCKS)
    here = await site(store=node.url, policy="prefix", prepare=offering(page))
    sent = asked(RESPONSES, stream=True)
    async with here.http.post(here.url(RESPONSES), json=sent) as answer:
        await answer.content.readuntil(b"\n\n")
        (stream,) = here.app.core.keep_alive.streams
        assert (stream.answering, stream.timing.first_s) == (True, 0)
        content.set()
        await answer.content.read()
    assert stream.timing.first_s > 0
    assert await metric(here, "kvrouter:time_to_first_token_seconds_count") == 1
    assert await metric(here, "kvrouter:passed_through_total") == 0


@PATHS
@pytest.mark.parametrize(
    ("rendered", "more"),
    [
        ({"token_ids": IDS, "features": {"mm_hashes": {"image": ["a"]}}}, {}),
        ({"token_ids": None}, {}),
        ({"error": {"message": "no"}}, {}),
        (None, {"role": "user", "content": [{"type": "input_image", "source": {}}]}),
    ],
)
async def test_one_engine_answers_where_token_ids_are_not_the_whole_prompt(
    site: Open, path: str, rendered: Json | None, more: Json
) -> None:
    more = {name: [more] for name in ("messages", "input") if more and name in ASKED[path]}
    here = await site(prepare=offering(saying(200, {"answer": 1}), rendered))
    status, _, answer = await here.post(asked(path, **more), path)
    assert (status, json.loads(answer)) == (200, {"answer": 1})
    assert here.prefill[0].requests == []
    assert posted(here.decode[0], path) == [asked(path, **more)]
    assert (
        await metric(here, f'kvrouter:passed_through_total{{code="200",model="m",path="{path}"}}')
        == 1
    )


@PATHS
async def test_an_engine_that_does_not_list_the_page_is_asked_alone(site: Open, path: str) -> None:
    def prepare(made: list[FakeEngine]) -> None:
        offering(saying(200, {"answer": 1}))(made)
        made[1].endpoints = (COMPLETIONS, *RENDERED)

    here = await site(prepare=prepare)
    assert (await here.post(asked(path), path))[0] == 200
    assert here.prefill[0].requests == []
    assert [at for at, _ in here.decode[0].posted] == [path]


async def test_what_the_prefill_engine_refuses_is_refused_in_the_words_of_the_endpoint(
    site: Open,
) -> None:
    here = await site(prepare=offering(saying(400, TOO_LONG)))
    here.prefill[0].pages[COMPLETIONS] = saying(400, {"error": {"message": "x", "code": 400}})
    status, _, answer = await here.post(asked(MESSAGES), MESSAGES)
    assert (status, json.loads(answer)) == (400, TOO_LONG)


async def test_a_stream_that_breaks_off_ends_with_anthropics_error(site: Open) -> None:
    here = await site(prepare=offering(streaming({"type": "message_start"}, dies=True)))
    status, _, answer = await here.post(asked(MESSAGES, stream=True), MESSAGES)
    assert status == 200
    assert len(here.prefill[0].requests) == 1
    last = json.loads(answer.decode().rstrip().rsplit("data: ", 1)[1])
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")


async def test_a_decode_engine_that_drops_a_request_before_its_answer_is_replaced(
    site: Open,
) -> None:
    here = await site(1, 2, prepare=offering(saying(200, {"answer": 1})))
    here.decode[0].pages[MESSAGES] = drop
    for _ in range(2):  # the turn of either engine
        status, _, answer = await here.post(asked(MESSAGES), MESSAGES)
        assert (status, json.loads(answer)) == (200, {"answer": 1})


@pytest.mark.parametrize(
    "more",
    [
        {"stream": "perhaps"},
        {"thinking": {"type": "disabled"}},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tools": 5},
        {"tools": [None]},
    ],
)
async def test_one_engine_answers_what_legs_could_answer_in_another_way(
    site: Open, more: Json
) -> None:
    here = await site(prepare=offering(saying(200, {"answer": 1})))
    status, _, answer = await here.post(asked(MESSAGES, **more), MESSAGES)
    assert (status, json.loads(answer)) == (200, {"answer": 1})
    assert [at for at, _ in here.decode[0].posted] == [MESSAGES]
    assert here.prefill[0].requests == []


async def test_responses_of_engines_that_hand_kv_over_are_answered_by_one(site: Open) -> None:
    here = await site(kv_connector="nixl", prepare=offering(saying(200, {"answer": 1})))
    for path, legs in ((RESPONSES, 0), (MESSAGES, 1)):
        assert (await here.post(asked(path), path))[0] == 200
        assert len(here.prefill[0].requests) == legs


async def test_the_budget_is_whole_after_a_refusal_that_one_engine_answers_instead(
    site: Open,
) -> None:
    """The decode engine that was to compute breaks; the prefill engine that is back refuses."""
    here = await site(
        1,
        2,
        health_interval_s=60.0,
        recompute_budget_tokens=150,
        prepare=offering(saying(200, {"answer": 1})),
    )
    pool = here.app.core.pool
    prefill = pool.find(here.prefill[0].address)
    assert prefill is not None
    assert prefill.identity is not None
    identity = prefill.identity
    here.prefill[0].pages[COMPLETIONS] = saying(400, {"error": {"message": "x", "code": 400}})

    async def break_off(exchange: Exchange) -> None:
        for engine in here.decode:
            engine.pages[MESSAGES] = saying(200, {"answer": 1})
        pool.join(prefill, identity)
        exchange.abort()

    async def render(exchange: Exchange) -> None:
        pool.leave(prefill)  # it was there when the endpoint looked
        await saying(200, {"token_ids": IDS, "features": None})(exchange)

    for _ in range(3):
        for engine in here.decode:
            engine.pages |= {MESSAGES: break_off, RENDERED[MESSAGES]: render}
        assert (await here.post(asked(MESSAGES), MESSAGES))[0] == 200
    assert await metric(here, "kvrouter:recompute_tokens") == 0
