"""Comments of the router to streaming clients that would hear nothing for too long."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from io import BytesIO

import aiohttp
import pytest
from tests.fakes.patience import until
from tests.integration.router.conftest import Json, Open, Site, chat, text
from tests.integration.router.test_comments import (
    CHATS,
    DONE,
    MESSAGES,
    PATHS,
    RESPONSES,
    asked,
    error_of,
    let,
    raw,
    saying,
    token,
)

from kvrouter.http.headers import SSE_HEADERS
from kvrouter.http.server.exchange import Exchange
from kvrouter.serving.streaming.keep_alive import COMMENT
from kvrouter.telemetry.request_log import RequestLog

SOON = {"sse_keep_alive_interval_s": 0.05}
Meanwhile = Callable[[], Awaitable[None]]


async def comments(answer: aiohttp.ClientResponse, count: int = 2) -> None:
    for _ in range(count):
        assert await answer.content.readexactly(len(COMMENT)) == COMMENT


async def begin(here: Site, body: Json, path: str = "/v1/completions") -> aiohttp.ClientResponse:
    """A stream that has begun with comments, while the rest of it is awaited."""
    async with asyncio.timeout(20):
        answer = await here.http.post(here.url(path), json=body)
        assert answer.status == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        await comments(answer)
    return answer


@pytest.mark.parametrize("ask", [text, chat])
@pytest.mark.parametrize("more", [{}, {"n": 2}, {"max_tokens": 2}])
async def test_a_long_prefill_is_not_silent(
    site: Open, ask: Callable[..., Json], more: Json
) -> None:
    here = await site(kv_connector="nixl", **SOON)
    here.prefill[0].mode = "held"
    if ask is chat:
        let(here.decode, saying(token(0, 0), DONE))
    path = "/v1/completions" if ask is text else CHATS
    answer = await begin(here, ask(stream=True, **more), path)
    here.prefill[0].go.set()
    body = await answer.read()
    assert body.endswith(DONE)
    assert b"error" not in body


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_other_endpoints_that_generate_are_not_silent(site: Open, path: str) -> None:
    here, go = await site(0, 1, **SOON), asyncio.Event()

    async def late(exchange: Exchange) -> None:
        await go.wait()
        exchange.start(200, SSE_HEADERS)
        await saying(b"event: x\ndata: {}\n\n")(exchange)

    here.decode[0].pages[path] = late
    answer = await begin(here, asked(path), path)
    go.set()
    assert (await answer.read()).removeprefix(COMMENT).endswith(b"event: x\ndata: {}\n\n")


async def test_a_queue_is_not_silent_and_its_503_is_an_event(site: Open) -> None:
    written = BytesIO()
    lines = RequestLog(written, plain=False)
    here = await site(max_concurrent_requests=1, queue_timeout_s=0.6, lines=lines, **SOON)
    here.decode[0].mode = "held"
    first = asyncio.create_task(here.post(text()))
    await here.decode[0].next_began()
    answer = await begin(here, text(stream=True))
    error = error_of(await answer.read(), "/v1/completions")
    assert error["code"] == 503
    here.decode[0].go.set()
    assert (await first)[0] == 200
    await here.app.close()
    queued = json.loads(written.getvalue().splitlines()[0])
    assert (queued["status"], queued["outcome"], "ttft_ms" in queued) == (503, "error", False)


@pytest.mark.parametrize("path", PATHS)
async def test_an_engines_refusal_after_comments_is_an_event(site: Open, path: str) -> None:
    here, go = await site(0, 1, **SOON), asyncio.Event()
    told: Json = {"error": {"message": "too long", "type": "BadRequestError", "code": 400}}
    told |= {"type": "error"} if path == MESSAGES else {}

    async def refuse(exchange: Exchange) -> None:
        await go.wait()
        exchange.respond(400, json.dumps(told).encode())

    here.decode[0].pages.update(dict.fromkeys(PATHS, refuse))
    answer = await begin(here, asked(path), path)
    go.set()
    assert error_of(await answer.read(), path)["message"] == "too long"


@pytest.mark.parametrize("path", PATHS)
async def test_an_engine_that_fails_after_comments_is_replaced_where_it_may_be(
    site: Open, path: str
) -> None:
    here, go = await site(0, 2, **SOON), asyncio.Event()

    async def fail(exchange: Exchange) -> None:
        if not go.is_set():
            await go.wait()
            exchange.abort()
            return
        exchange.start(200, SSE_HEADERS)
        await saying(token(0, 0), DONE)(exchange)

    for engine in here.decode:
        engine.pages.update(dict.fromkeys(PATHS, fail))
    answer = await begin(here, asked(path), path)
    go.set()
    body = await answer.read()
    if path in PATHS[:2]:
        assert b'" t0"' in body
    else:
        assert "message" in error_of(body, path)


async def test_a_body_that_is_no_stream_is_an_error_after_comments(site: Open) -> None:
    here, go = await site(0, 1, **SOON), asyncio.Event()

    async def whole(exchange: Exchange) -> None:
        await go.wait()
        exchange.respond(200, b'{"type": "message"}')

    here.decode[0].pages[MESSAGES] = whole
    answer = await begin(here, asked(MESSAGES), MESSAGES)
    go.set()
    assert "no stream" in error_of(await answer.read(), MESSAGES)["message"]


@pytest.mark.parametrize("path", PATHS)
async def test_a_pause_between_events_is_not_silent(site: Open, path: str) -> None:
    here, go = await site(0, 1, **SOON), asyncio.Event()

    async def pause(exchange: Exchange) -> None:
        exchange.write(token(0))
        await go.wait()
        exchange.write(token(1, 1) + DONE)
        exchange.end()

    let(here.decode, pause)
    async with here.http.post(here.url(path), json=asked(path)) as answer:
        await answer.content.readuntil(b"\n\n")
        await comments(answer)
        go.set()
        assert (await answer.read()).count(b"data: {") == 1


async def test_no_comment_cuts_an_event(site: Open) -> None:
    here, go = await site(0, 1, **SOON), asyncio.Event()
    halves = [b'data: {"choices": [', b'{"text": "a", "finish_reason": null}]}\n\n']

    async def pause(exchange: Exchange) -> None:
        exchange.write(token(0) + halves[0])
        await go.wait()
        exchange.write(halves[1] + token(1, 1) + DONE)
        exchange.end()

    let(here.decode, pause)
    async with here.http.post(here.url("/v1/completions"), json=text(stream=True)) as answer:
        await answer.content.readuntil(b"\n\n")
        await comments(answer)
        go.set()
        body = await answer.read()
    assert b"".join(halves) in body


async def test_a_client_of_http_1_0_gets_comments_as_they_are(site: Open) -> None:
    here = await site(**SOON)
    here.prefill[0].mode = "held"
    got = asyncio.create_task(raw(here, text(stream=True), "1.0"))
    await here.prefill[0].next_began()
    await until(lambda: any(each.exchange.started for each in here.app.core.keep_alive.streams))
    here.prefill[0].go.set()
    head, body = (await got).split(b"\r\n\r\n", 1)
    assert b"transfer-encoding" not in head
    assert body.startswith(COMMENT)
    assert body.endswith(DONE)


async def test_who_asks_for_no_stream_waits_in_silence_and_gets_a_status(site: Open) -> None:
    here = await site(**SOON)
    here.prefill[0].mode = "held"
    whole = asyncio.create_task(here.post(text()))
    await here.prefill[0].next_began()
    stream = await begin(here, text(stream=True))  # meanwhile
    here.prefill[0].go.set()
    status, headers, body = await whole
    assert (status, headers["content-type"]) == (200, "application/json")
    assert json.loads(body)["choices"]
    await stream.read()


async def test_a_client_that_leaves_after_comments_ends_its_legs(site: Open) -> None:
    written = BytesIO()
    here = await site(lines=RequestLog(written, plain=False), **SOON)
    here.prefill[0].mode = "hang"
    answer = await begin(here, text(stream=True))
    answer.close()
    await here.prefill[0].next_left()
    await until(lambda: not here.app.core.keep_alive.streams)
    await here.app.close()
    line = json.loads(written.getvalue())
    assert (line["status"], line["outcome"]) == (499, "client_left")


async def test_a_router_that_stops_says_so_after_comments(site: Open) -> None:
    written = BytesIO()
    here = await site(lines=RequestLog(written, plain=False), **SOON)
    here.prefill[0].mode = "hang"
    answer = await begin(here, text(stream=True))
    rest = asyncio.create_task(answer.read())
    await here.app.close()
    assert error_of(await rest, "/v1/completions")["code"] == 503
    line = json.loads(written.getvalue())
    assert (line["status"], line["outcome"]) == (503, "cut_off")


async def test_an_error_before_the_first_comment_keeps_its_status(site: Open) -> None:
    here = await site(0, 1)
    here.decode[0].mode = "drop"
    status, headers, _ = await here.post(text(stream=True))
    assert (status, headers["content-type"]) == (503, "application/json")


async def test_an_interval_of_0_sends_none(site: Open) -> None:
    here = await site(sse_keep_alive_interval_s=0)
    here.prefill[0].mode = "held"
    got = asyncio.create_task(here.post(text(stream=True)))
    await here.prefill[0].next_began()
    here.app.core.keep_alive.expire()
    here.prefill[0].go.set()
    assert COMMENT not in (await got)[2]
