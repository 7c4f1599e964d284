"""Endpoints that one decode engine answers: what passes, what does not, and who is asked again."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from io import BytesIO
from typing import Any

import aiohttp
import pytest
from tests.fakes.engine import FakeEngine
from tests.integration.router.conftest import Json, Open, Site, metric

from kvrouter.engines.breaker import BreakerState
from kvrouter.http.headers import SSE_HEADERS
from kvrouter.http.server.exchange import Exchange
from kvrouter.openai.endpoints import ENDPOINTS
from kvrouter.openai.response import TRANSFERS
from kvrouter.telemetry.request_log import RequestLog

POSTED = [one.path for one in ENDPOINTS if one.method == "POST"]
RESPONSES, MESSAGES, RERANK = "/v1/responses", "/v1/messages", "/rerank"
Page = Callable[[Exchange], Awaitable[None]]


def saying(status: int, answer: Any) -> Page:
    async def page(exchange: Exchange) -> None:
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        exchange.respond(status, body)

    return page


async def drop(exchange: Exchange) -> None:
    exchange.abort()


async def hang(exchange: Exchange) -> None:
    del exchange
    await asyncio.Event().wait()


def streaming(*events: Json, name: bytes = b"x", dies: bool = False) -> Page:
    async def page(exchange: Exchange) -> None:
        exchange.start(200, SSE_HEADERS)
        for event in events:
            exchange.write(b"event: %b\ndata: %b\n\n" % (name, json.dumps(event).encode()))
        if dies:
            exchange.write(b'data: {"half')
            await exchange.drain()
            exchange.abort()
            return
        exchange.end()

    return page


def offer(engines: list[FakeEngine], page: Page, *paths: str) -> None:
    for engine in engines:
        engine.pages.update(dict.fromkeys(paths or POSTED, page))


def body(**more: Any) -> Json:
    return {"model": "m", "input": "a", "query": "q", **more}


def state(here: Site, engine: FakeEngine) -> BreakerState | None:
    found = here.app.core.pool.find(engine.address)
    assert found is not None
    return here.app.core.pool.state(found)


@pytest.mark.parametrize("path", POSTED)
async def test_a_decode_engine_answers_what_it_was_asked(site: Open, path: str) -> None:
    here = await site()
    offer(here.decode, saying(200, {"answer": 1}))
    sent = b'{ "model" : "m", "input": ["\\u00e9", 1e2] }'
    status, headers, answer = await here.post(sent, path, **{"x-request-id": "mine"})
    assert (status, json.loads(answer)) == (200, {"answer": 1})
    assert headers["x-request-id"] == "mine"
    assert headers["content-type"] == "application/json"
    assert here.decode[0].posted == [(path, sent)]
    assert here.prefill[0].posted == []
    page = (await here.get("/metrics"))[1].decode()
    assert f'kvrouter:passed_through_total{{code="200",model="m",path="{path}"}} 1.0' in page


async def test_what_is_the_routers_own_passes_neither_way(site: Open) -> None:
    here = await site()
    secret = {name: {"host": "10.0.0.7"} for name in sorted(TRANSFERS)}
    offer(here.decode, saying(200, {"answer": 1, **secret}))
    status, _, answer = await here.post(body(**secret), RESPONSES)
    assert (status, json.loads(answer)) == (200, {"answer": 1})
    assert json.loads(here.decode[0].posted[0][1]) == body()


async def test_requests_go_to_the_engines_in_turn(site: Open) -> None:
    here = await site(1, 2)
    offer(here.decode, saying(200, {}))
    for _ in range(4):
        await here.post(body(), RERANK)
    assert [len(engine.posted) for engine in here.decode] == [2, 2]


@pytest.mark.parametrize("status", [404, 405, 501])
@pytest.mark.parametrize("told", [{"detail": "Not Found"}, b"<html>", b"[1]"])
async def test_what_an_engine_does_not_have_is_its_answer(
    site: Open, status: int, told: Any
) -> None:
    here = await site(1, 2)
    offer(here.decode, saying(status, told))
    for _ in range(5):
        got, _, answer = await here.post(body(), RERANK)
        assert (got, json.loads(answer)["error"]["code"]) == (status, status)
        assert RERANK in json.loads(answer)["error"]["message"]
    assert {state(here, engine) for engine in here.decode} == {BreakerState.CLOSED}


async def test_an_engines_own_error_is_the_clients_answer(site: Open) -> None:
    here = await site()
    error = {"error": {"message": "too long", "type": "x", "param": "input", "code": 400}}
    offer(here.decode, saying(400, error))
    status, _, answer = await here.post(body(), "/v1/embeddings")
    assert (status, json.loads(answer)) == (400, error)


@pytest.mark.parametrize("page", [saying(500, {}), saying(429, {}), drop])
async def test_where_it_is_safe_another_engine_is_asked(site: Open, page: Page) -> None:
    here = await site(1, 2)
    offer(here.decode[:1], page)
    offer(here.decode[1:], saying(200, {}))
    for _ in range(2):  # the turn of either engine
        assert (await here.post(body(), RERANK))[0] == 200
    assert len(here.decode[0].posted) == 1


@pytest.mark.parametrize(("page", "expected"), [(saying(500, {}), 500), (drop, 503)])
async def test_what_an_engine_may_have_begun_is_not_asked_twice(
    site: Open, page: Page, expected: int
) -> None:
    here = await site(1, 2)
    offer(here.decode, page)
    status, _, answer = await here.post(body(), RESPONSES)
    assert (status, json.loads(answer)["error"]["code"]) == (expected, expected)
    assert sum(len(engine.posted) for engine in here.decode) == 1


@pytest.mark.parametrize(("path", "times"), [(RESPONSES, 2), ("/v1/messages", 2), (RERANK, 3)])
async def test_what_may_have_begun_is_not_sent_again_when_a_kept_connection_breaks(
    site: Open, path: str, times: int
) -> None:
    here = await site(1, 1)
    offer(here.decode, saying(200, {}))
    assert (await here.post(body(), path))[0] == 200
    offer(here.decode, drop)
    assert (await here.post(body(), path))[0] == 503
    assert len(here.decode[0].posted) == times


async def test_what_an_engine_has_not_seen_goes_to_another(site: Open) -> None:
    here = await site(1, 2, health_interval_s=60)
    offer(here.decode, saying(200, {}))
    await here.decode[0].stop()
    for _ in range(2):
        assert (await here.post(body(), RESPONSES))[0] == 200
    offer(here.decode[1:], saying(429, {}))
    status, headers, _ = await here.post(body(), RESPONSES)
    assert (status, headers["retry-after"]) == (429, "1")


async def test_failures_open_the_engines_breaker(site: Open) -> None:
    here = await site()
    offer(here.decode, drop)
    for _ in range(3):
        assert (await here.post(body(), RERANK))[0] == 503
    assert state(here, here.decode[0]) is BreakerState.OPEN


async def test_a_stream_is_relayed_without_what_is_the_routers_own(site: Open) -> None:
    here = await site()
    done = {"type": "response.completed", "response": {"id": "r", "kv_transfer_params": {"a": 1}}}
    offer(here.decode, streaming({"type": "response.created"}, done))
    status, headers, answer = await here.post(body(stream=True), RESPONSES)
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    first, second, end = answer.decode().split("\n\n")
    assert first == 'event: x\ndata: {"type": "response.created"}'
    assert second.startswith("event: x\ndata: ")
    assert json.loads(second.split("data: ")[1])["response"] == {"id": "r"}
    assert end == ""


async def test_a_stream_that_breaks_off_ends_with_an_error_event(site: Open) -> None:
    here = await site()
    offer(here.decode, streaming({"n": 1}, dies=True))
    _, _, answer = await here.post(body(stream=True), RESPONSES)
    events = answer.decode().split("\n\n")
    assert events[0] == 'event: x\ndata: {"n": 1}'
    error = json.loads(events[1].removeprefix("event: error\ndata: "))
    assert (error["type"], error["code"], error["sequence_number"]) == ("error", "502", 1)
    assert error["message"] == error["error"]["message"]
    assert events[2:] == [""]
    assert b"half" not in answer


async def test_the_log_line_names_the_engine_and_why_a_request_failed(site: Open) -> None:
    written = BytesIO()
    here = await site(lines=RequestLog(written, plain=False))
    for page in (saying(200, {}), saying(500, {}), streaming({"n": 1}, dies=True)):
        offer(here.decode, page)
        await here.post(body(stream=True), RESPONSES)
    await here.app.close()
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    assert [line.get("outcome") for line in lines] == [None, "error", "broken"]
    assert [line["status"] for line in lines] == [200, 500, 200]
    for line in lines:
        assert (line["path"], line["model"], line["attempts"]) == (RESPONSES, "m", 1)
        assert line["decode"] == here.decode[0].address
        assert ("error" in line) == ("outcome" in line)


AGENTS = {
    RESPONSES: ("response.created", "response.in_progress", "response.output_text.delta"),
    MESSAGES: ("message_start", "content_block_start", "content_block_delta"),
}


@pytest.mark.parametrize("path", AGENTS)
async def test_a_stream_of_an_agent_is_timed_from_its_first_content_on(
    site: Open, path: str
) -> None:
    *announcing, delta = (b"event: %b\ndata: {}\n\n" % name.encode() for name in AGENTS[path])
    usage = b'event: end\ndata: {"usage":{"input_tokens":77,"output_tokens":3}}\n\n'

    async def page(exchange: Exchange) -> None:
        exchange.start(200, SSE_HEADERS)
        for event in announcing:
            exchange.write(event)
            await exchange.drain()
        await content.wait()
        for event in (delta, delta, delta, usage):
            exchange.write(event)
        exchange.end()

    content, written = asyncio.Event(), BytesIO()
    here = await site(lines=RequestLog(written, plain=False))
    offer(here.decode, page, path)
    async with here.http.post(here.url(path), json=body(stream=True)) as answer:
        await answer.content.readuntil(announcing[-1])
        (stream,) = here.app.core.keep_alive.streams
        assert stream.timing.first_s == 0
        content.set()
        await answer.content.read()
    assert stream.timing.first_s > 0
    for name in ("time_to_first_token", "e2e_request_latency"):
        assert await metric(here, f"kvrouter:{name}_seconds_count") == 1
    assert await metric(here, "kvrouter:request_success_total") == 1
    ttft_s, gaps_s, all_s = [
        await metric(here, f"kvrouter:{name}_seconds_sum")
        for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency")
    ]
    assert ttft_s + gaps_s <= all_s
    await here.app.close()
    (line,) = [json.loads(line) for line in written.getvalue().splitlines()]
    assert (line["plan"], line["prompt_tokens"], line["generated"]) == ("not rendered", 77, 3)
    assert line["ttft_ms"] <= line["total_ms"]
    assert "prefill" not in line


async def test_an_engine_that_never_answers_is_a_504(site: Open) -> None:
    here = await site(request_timeout_s=0.3)
    offer(here.decode, hang)
    assert (await here.post(body(), RERANK))[0] == 504
    await here.decode[0].next_left()


async def test_a_client_that_leaves_ends_the_request_there(site: Open) -> None:
    here = await site()
    began = asyncio.Event()

    async def begin(exchange: Exchange) -> None:
        began.set()
        await hang(exchange)

    offer(here.decode, begin)
    task = asyncio.create_task(here.post(body(), RERANK))
    async with asyncio.timeout(10):
        await began.wait()
    task.cancel()
    await here.decode[0].next_left()


@pytest.mark.parametrize(
    ("sent", "path", "status", "param"),
    [
        (b"{", RERANK, 400, None),
        (b"[]", RERANK, 400, None),
        (b'{"model": "m", "model": "n"}', RERANK, 400, None),
        (body(model=3), RERANK, 400, "model"),
        (body(model="nobody"), RERANK, 404, "model"),
        (body(background=True), RESPONSES, 400, "background"),
        (body(previous_response_id="resp_1"), RESPONSES, 400, "previous_response_id"),
        (body(vllm_xargs={"kv_transfer_params": 1}), RESPONSES, 400, "vllm_xargs"),
    ],
)
async def test_what_cannot_be_passed_on_is_refused(
    site: Open, sent: Any, path: str, status: int, param: str | None
) -> None:
    here = await site()
    offer(here.decode, saying(200, {}))
    got, headers, answer = await here.post(sent, path)
    assert (got, json.loads(answer)["error"]["param"]) == (status, param)
    assert headers["x-request-id"]
    assert here.decode[0].posted == []


async def test_without_a_decode_engine_the_client_is_asked_to_wait(site: Open) -> None:
    here = await site(health_interval_s=60, engine_wait_s=0)
    await here.decode[0].stop()
    for _ in range(2):
        status, headers, _ = await here.post(body(), RERANK)
        assert (status, headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize(("prefill", "status"), [(1, 429), (0, 200)])
async def test_prompts_of_responses_count_as_recomputed(
    site: Open, prefill: int, status: int
) -> None:
    here = await site(prefill, 1, recompute_budget_tokens=0)
    offer(here.decode, saying(200, {}))
    assert (await here.post(body(), RESPONSES))[0] == status
    assert (await here.post(body(), RERANK))[0] == 200


async def test_a_prompt_that_is_computed_is_not_counted_as_recomputed_any_more(site: Open) -> None:
    begun, compute, go = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def page(exchange: Exchange) -> None:
        exchange.start(200, SSE_HEADERS)
        exchange.write(b"event: response.created\ndata: {}\n\n")
        begun.set()
        await compute.wait()
        exchange.write(b"event: response.output_text.delta\ndata: {}\n\n")
        await go.wait()
        exchange.end()

    here = await site(1, 1, recompute_budget_tokens=10)
    offer(here.decode, page, RESPONSES)
    budget = here.app.core.budget
    first = asyncio.create_task(here.post(body(stream=True), RESPONSES))
    await begun.wait()
    for _ in range(100):  # what arrives says nothing of the prompt
        await asyncio.sleep(0)
    assert budget.tokens > 0
    compute.set()
    async with asyncio.timeout(10):
        while budget.tokens:
            await asyncio.sleep(0)
    assert here.app.core.pool.all()[1].computing_tokens == 0
    go.set()
    assert (await first)[0] == 200


async def test_real_endpoints_of_an_engine_are_reached(site: Open) -> None:
    here = await site()
    status, _, answer = await here.post({"model": "m", "prompt": "ab"}, "/tokenize")
    assert (status, json.loads(answer)["tokens"]) == (200, [97, 98])


@pytest.mark.parametrize("path", ["/ping", "/ready", "/health"])
async def test_readiness_is_whether_requests_can_be_served(site: Open, path: str) -> None:
    here = await site(health_interval_s=60, engine_wait_s=0)
    assert (await here.get(path))[0] == 200
    await here.decode[0].stop()
    await here.post(body(), RERANK)
    assert (await here.get(path))[0] == 503
    assert (await here.get("/live"))[0] == 200


async def test_the_version_is_told_in_vllms_words(site: Open) -> None:
    here = await site()
    status, answer = await here.get("/version")
    assert status == 200
    assert json.loads(answer)["version"].count(".") >= 1
    assert (await here.post({}, "/ping"))[0] == 200


GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize")


def one_embeds(made: list[FakeEngine]) -> None:
    """The first engine generates text; the last one is a model of its own that only embeds."""
    made[0].endpoints = GENERATING
    made[-1].model, made[-1].endpoints = "e", ("/v1/embeddings", "/v1/score", "/tokenize")
    made[-1].pages["/v1/embeddings"] = saying(200, {"data": []})


async def test_an_engine_that_only_embeds_serves_its_endpoints_beside_one_that_generates(
    site: Open,
) -> None:
    here = await site(0, 2, prepare=one_embeds)
    assert (await here.post({"model": "e", "input": "a"}, "/v1/embeddings"))[0] == 200
    assert (await here.post({"input": "a"}, "/v1/embeddings"))[0] == 200
    assert (await here.post({"model": "m", "prompt": "a", "max_tokens": 1}))[0] == 200
    names = {card["id"] for card in json.loads((await here.get("/v1/models"))[1])["data"]}
    assert names == {"m", "e"}
    assert [path for path, _ in here.decode[1].posted] == ["/v1/embeddings"] * 2
    assert here.decode[0].posted == []


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ("m", "/v1/embeddings"),
        ("m", "/rerank"),
        ("e", "/v1/completions"),
        ("e", "/v1/chat/completions"),
        ("e", "/v1/responses"),
        ("e", "/v1/rerank"),
    ],
)
async def test_an_endpoint_that_no_engine_of_the_model_serves_is_a_404_at_once(
    site: Open, model: str, path: str
) -> None:
    here = await site(0, 2, prepare=one_embeds, engine_wait_s=60)
    messages = [{"role": "user", "content": "a"}]
    status, _, answer = await here.post(
        {"model": model, "input": "a", "prompt": "a", "messages": messages}, path
    )
    error = json.loads(answer)["error"]
    assert (status, error["type"], error["code"]) == (404, "NotFoundError", "endpoint_not_served")
    none, served = error["message"].split(" Served: ")
    assert none == f"No engine of the model `{model}` serves {path}."
    assert served.removesuffix(".").split(", ") == sorted(here.decode[model == "e"].endpoints or ())
    assert here.decode[0].posted == here.decode[1].posted == []


async def test_a_fleet_that_only_embeds_is_well(site: Open) -> None:
    here = await site(0, 1, prepare=one_embeds)
    status, answer = await here.get("/health")
    assert (status, json.loads(answer)) == (200, {"status": "ok", "lacking": []})


async def test_a_fleet_whose_last_engine_that_generates_is_gone_says_so(site: Open) -> None:
    here = await site(0, 2, prepare=one_embeds)
    await here.decode[0].stop()
    async with asyncio.timeout(10):
        while b"no engine that generates text is available" not in (await here.get("/health"))[1]:
            pass
    assert (await here.post({"model": "m", "prompt": "a"}))[0] == 503
    assert (await here.post({"model": "e", "input": "a"}, "/v1/embeddings"))[0] == 200


CLASSIFY = "/v1/classify"


def lists(*paths: str) -> Callable[[list[FakeEngine]], None]:
    """Engines that list and answer these endpoints besides completions."""

    def prepare(made: list[FakeEngine]) -> None:
        for engine in made:
            engine.endpoints = ("/v1/completions", *paths)
        offer(made, saying(200, {"answer": 1}), *paths)

    return prepare


async def test_what_else_an_engine_lists_below_v1_passes_with_its_session(site: Open) -> None:
    here = await site(
        0, 4, policy="prefix", route_headers=True, prepare=lists(CLASSIFY), health_interval_s=60.0
    )
    engines = set()
    for turn in range(6):
        named = {"x-session-id": "s"}
        status, fields, answer = await here.post(body(input=str(turn)), CLASSIFY, **named)
        assert (status, json.loads(answer)) == (200, {"answer": 1})
        engines.add(fields["x-kvrouter-decode"])
    assert len(engines) == 1
    page = (await here.get("/metrics"))[1].decode()
    assert 'kvrouter:passed_through_total{code="200",model="m",path="other"} 6.0' in page


@pytest.mark.parametrize(
    "path", ["/v1/none", "/v1/load_lora_adapter", "/v1/things/{id}/cancel", "/v1/things/a/cancel"]
)
async def test_what_no_engine_offers_to_clients_is_a_404_that_says_what_is_served(
    site: Open, path: str
) -> None:
    listed = ("/v1/load_lora_adapter", "/v1/things/{id}/cancel", CLASSIFY)
    here = await site(0, 1, prepare=lists(*listed))
    status, _, answer = await here.post(body(), path)
    message = json.loads(answer)["error"]["message"]
    assert (status, message.split(" Served: ")[1]) == (404, "/v1/classify, /v1/completions.")
    assert here.decode[0].posted == []


async def test_without_a_list_only_the_usual_endpoints_are_served(site: Open) -> None:
    here = await site(0, 1)
    offer(here.decode, saying(200, {}), CLASSIFY)
    assert (await here.post(body(), CLASSIFY))[0] == 404
    assert here.decode[0].posted == []


@pytest.mark.parametrize("page", [saying(500, {}), saying(403, {}), saying(200, b"RIFF no JSON")])
async def test_what_other_endpoints_answer_says_nothing_about_their_engine(
    site: Open, page: Page
) -> None:
    here = await site(0, 1, prepare=lists(CLASSIFY))
    offer(here.decode, page, CLASSIFY)
    for _ in range(5):
        assert (await here.post(body(), CLASSIFY))[0] in (500, 403, 200)
    assert state(here, here.decode[0]) is BreakerState.CLOSED


async def test_other_endpoints_teach_no_prefix_and_take_no_budget(site: Open) -> None:
    here = await site(
        1, 2, policy="prefix", recompute_budget_tokens=0, prepare=lists("/v1/messages/render")
    )
    asked = {"model": "m", "messages": [{"role": "user", "content": "x" * 4000}]}
    assert (await here.post(asked, "/v1/messages/render"))[0] == 200
    assert len(here.app.core.index) == 0


TRANSCRIPTIONS = "/v1/audio/transcriptions"


async def test_a_form_reaches_an_engine_of_its_model_as_it_was_sent(site: Open) -> None:
    here = await site(0, 2, prepare=lists(TRANSCRIPTIONS), model_alias=["whisper=m"])
    offer(here.decode, saying(200, b"hello"), TRANSCRIPTIONS)
    for model, status in (("m", 200), ("whisper", 200), ("other", 404)):
        form = aiohttp.FormData({"model": model})
        form.add_field("file", bytes(range(256)) * 1000, filename="a.wav")
        async with here.http.post(here.url(TRANSCRIPTIONS), data=form) as answer:
            assert answer.status == status
            if status == 200:
                assert await answer.read() == b"hello"
    sent = [fields for engine in here.decode for fields in engine.posted_headers]
    assert len(sent) == 2
    for engine in here.decode:
        for (_, body), headers in zip(engine.posted, engine.posted_headers, strict=True):
            boundary = headers["content-type"].partition("boundary=")[2].encode()
            assert body.startswith(b"--" + boundary)
            assert bytes(range(256)) * 1000 in body
            assert b"\r\n\r\nm\r\n" in body  # not the alias


async def test_a_form_may_ask_for_a_stream(site: Open) -> None:
    here = await site(0, 1, prepare=lists(TRANSCRIPTIONS))
    offer(here.decode, streaming({"text": "hel"}, {"text": "lo"}), TRANSCRIPTIONS)
    form = aiohttp.FormData({"stream": "true", "model": "m"}, default_to_multipart=True)
    async with here.http.post(here.url(TRANSCRIPTIONS), data=form) as answer:
        assert answer.content_type == "text/event-stream"
        assert (await answer.read()).count(b"data: ") == 2


async def test_a_form_that_is_none_is_a_400_and_reaches_no_engine(site: Open) -> None:
    here = await site(0, 1, prepare=lists(TRANSCRIPTIONS))
    kind = {"content-type": "multipart/form-data; boundary=x"}
    status, _, answer = await here.post(b"--y--", TRANSCRIPTIONS, **kind)
    assert (status, "form" in json.loads(answer)["error"]["message"]) == (400, True)
    assert here.decode[0].posted == []


ANTHROPIC = ["/v1/messages", "/v1/messages/count_tokens"]


@pytest.mark.parametrize("path", ANTHROPIC)
@pytest.mark.parametrize(
    ("asked", "status", "kind"),
    [
        (b"[]", 400, "invalid_request_error"),
        ({"model": "zz"}, 404, "not_found_error"),
        ({"model": "m"}, 503, "overloaded_error"),
    ],
)
async def test_errors_of_messages_are_anthropics(
    site: Open, path: str, asked: Any, status: int, kind: str
) -> None:
    here = await site(0, 1)
    offer(here.decode, drop, *ANTHROPIC)
    got, _, answer = await here.post(asked, path)
    error = json.loads(answer)
    assert (got, error["type"], error["error"]["type"]) == (status, "error", kind)
    assert error["error"]["message"]


async def test_messages_that_break_off_end_with_an_event_that_anthropics_clients_read(
    site: Open,
) -> None:
    here = await site(0, 1)
    offer(here.decode, streaming({"type": "message_start"}, dies=True), "/v1/messages")
    _, _, answer = await here.post(body(stream=True), "/v1/messages")
    name, data = answer.split(b"\n\n")[-2].split(b"\n")
    assert (name, json.loads(data.removeprefix(b"data: "))["type"]) == (b"event: error", "error")
    assert b"[DONE]" not in answer
