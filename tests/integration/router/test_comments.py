"""Comments in streams, by which engines keep connections alive: passed on, and nothing else."""

import asyncio
import json
from collections.abc import Callable
from io import BytesIO
from time import monotonic
from typing import Any

import pytest
from tests.fakes.engine import FakeEngine
from tests.fakes.patience import every, until
from tests.integration.router.conftest import Json, Open, Site, chat, metric, text

from kvrouter.http.headers import SSE_HEADERS
from kvrouter.http.server.exchange import Exchange
from kvrouter.telemetry.request_log import RequestLog

COMMENT = b": keep-alive\n\n"
SILENCE = [
    COMMENT,
    b":\r\n\r\n",
    b"event: ping\nid: 1\n\n",
    b"\xef\xbb\xbf: a\n: b\n\n",
    b"retry: 9\r\r",
]
DONE = b"data: [DONE]\n\n"
MESSAGES, RESPONSES, CHATS = "/v1/messages", "/v1/responses", "/v1/chat/completions"
PATHS = ["/v1/completions", CHATS, MESSAGES, RESPONSES]
Say = Callable[[Exchange], Any]


def asked(path: str, **more: Any) -> Json:
    if path == "/v1/completions":
        return text(stream=True, **more)
    return chat(stream=True, input="a", **more)


def let(engines: list[FakeEngine], say: Say, *paths: str) -> None:
    """Engines begin a stream for each request, and then do as `say` says."""

    async def page(exchange: Exchange) -> None:
        exchange.start(200, SSE_HEADERS)
        await say(exchange)

    for engine in engines:
        engine.pages.update(dict.fromkeys(paths or PATHS, page))


def token(i: int, last: int = 2) -> bytes:
    choice = {"index": 0, "text": f" t{i}", "finish_reason": "stop" if i == last else None}
    return b"data: %b\n\n" % json.dumps({"id": "cmpl-1", "choices": [choice]}).encode()


def saying(*pieces: bytes, dies: bool = False) -> Say:
    async def say(exchange: Exchange) -> None:
        for piece in pieces:
            exchange.write(piece)
            await exchange.drain()
        exchange.abort() if dies else exchange.end()

    return say


async def commenting(exchange: Exchange) -> None:
    """Comments without an end, until the router leaves."""
    await every(0.01, lambda: exchange.write(COMMENT))


def error_of(body: bytes, path: str) -> Json:
    """The error event at the end of a stream, as clients of that endpoint read it."""
    *_, last = [one for one in body.decode().split("\n\n") if one and one != "data: [DONE]"]
    assert last.startswith("event: error\n") == (path in (MESSAGES, RESPONSES))
    assert body.endswith(DONE) == (path not in (MESSAGES, RESPONSES))
    event: Json = json.loads(last.partition("data: ")[2])
    assert event.get("type") == ("error" if path in (MESSAGES, RESPONSES) else None)
    error: Json = event["error"]
    return error


async def raw(here: Site, body: Json, version: str = "1.1") -> bytes:
    """All bytes that a client of a completion gets."""
    sent = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
    head = f"POST /v1/completions HTTP/{version}\r\nhost: x\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(sent)}\r\n\r\n".encode() + sent)
    got = await reader.read()
    writer.close()
    return got


async def test_comments_are_no_tokens_and_not_the_first_one(site: Open) -> None:
    written, go = BytesIO(), asyncio.Event()
    here = await site(lines=RequestLog(written, plain=False))

    async def say(exchange: Exchange) -> None:
        exchange.write(COMMENT)
        await go.wait()
        for i in range(3):
            exchange.write(token(i) + b"event: ping\n\n")
            exchange.write(COMMENT)
        exchange.write(DONE)
        exchange.end()

    let(here.decode, say)
    async with here.http.post(here.url("/v1/completions"), json=text(stream=True)) as answer:
        assert await answer.content.readexactly(len(COMMENT)) == COMMENT
        seen_s = monotonic()
        await until(lambda: monotonic() - seen_s > 0.1)
        go.set()
        body = await answer.read()
    assert body.count(COMMENT) == 3
    assert body.count(b"data: {") == 3
    assert await metric(here, "kvrouter:generation_tokens_total") == 3
    await here.app.close()
    line = json.loads(written.getvalue())
    assert (line["status"], line["generated"], line["attempts"]) == (200, 3, 1)
    assert line["ttft_ms"] > 100


@pytest.mark.parametrize("silence", SILENCE)
@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_an_engine_that_dies_after_comments_alone_is_replaced(
    site: Open, silence: bytes, version: str
) -> None:
    here = await site(0, 2)
    first, second = here.decode
    let([first], saying(silence, silence, dies=True))
    let([second], saying(silence, *map(token, range(3)), DONE))
    for _ in range(2):  # one of them begins at the engine that dies
        got = await raw(here, text(stream=True), version)
        assert got.count(b"HTTP/1.1 200 OK") == 1
        assert got.count(b"data: {") == 3
        assert b'" t2"' in got
        assert got.endswith(DONE if version == "1.0" else b"0\r\n\r\n")


@pytest.mark.parametrize("path", PATHS)
async def test_an_error_after_comments_is_an_event_and_counts_as_an_error(
    site: Open, path: str
) -> None:
    written = BytesIO()
    here = await site(0, 1, lines=RequestLog(written, plain=False))
    let(here.decode, saying(COMMENT, dies=True))
    status, headers, body = await here.post(asked(path), path)
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    assert body.startswith(COMMENT)
    assert "message" in error_of(body, path)
    counted = 'request_errors_total{code="503"' if path in PATHS[:2] else "passed_through_total"
    page = (await here.get("/metrics"))[1].decode()
    assert [r for r in page.splitlines() if r.startswith(f"kvrouter:{counted}") and "503" in r]
    await here.app.close()
    line = json.loads(written.getvalue())
    assert (line["status"], line["outcome"]) == (503, "error")


@pytest.mark.parametrize("path", PATHS)
async def test_a_refusal_after_comments_is_an_event_with_the_engines_words(
    site: Open, path: str
) -> None:
    here = await site(0, 2)
    told: Json = {"error": {"message": "too long", "param": "prompt", "code": 400}}
    told |= {"type": "error"} if path == MESSAGES else {}

    async def refuse(exchange: Exchange) -> None:
        exchange.respond(400, json.dumps(told).encode())

    let(here.decode[:1], saying(COMMENT, dies=True))
    here.decode[1].pages.update(dict.fromkeys(PATHS, refuse))
    seen = dict([(await here.post(asked(path), path))[::2] for _ in range(2)])
    assert json.loads(seen[400]) == told
    again = path in PATHS[:2]  # others are not asked of a second engine
    assert (error_of(seen[200], path)["message"] == "too long") == again


async def test_an_error_behind_comments_is_not_an_answer(site: Open) -> None:
    here = await site(0, 2)
    error = b'data: {"error": {"message": "dead", "code": 500}}\n\n'
    let(here.decode[:1], saying(COMMENT * 9 + b": {}\n\n" + error, DONE))
    let(here.decode[1:], saying(*map(token, range(3)), DONE))
    for _ in range(2):
        _, _, body = await here.post(text(stream=True))
        assert body.count(b"data: {") == 3
        assert b"dead" not in body


@pytest.mark.parametrize("framed", [False, True])
@pytest.mark.parametrize("begun", [False, True])
async def test_comments_keep_no_deadline_from_passing(
    site: Open, begun: bool, framed: bool
) -> None:
    here = await site(0, 1, request_timeout_s=0.2)

    async def say(exchange: Exchange) -> None:
        if begun:
            exchange.write(token(0))
        await commenting(exchange)

    async def unframed(exchange: Exchange) -> None:
        exchange.channel.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
        )
        exchange.started = True
        await say(exchange)

    let(here.decode, say)
    if not framed:
        here.decode[0].pages["/v1/completions"] = unframed
    _, _, body = await here.post(text(stream=True))
    assert error_of(body, "/v1/completions")["code"] == (502 if begun else 504)
    assert body.count(b"t0") == begun
    assert COMMENT in body
    await here.decode[0].next_left()


@pytest.mark.parametrize("path", PATHS[:2])
async def test_a_comment_reaches_the_client_of_several_choices_as_it_came(
    site: Open, path: str
) -> None:
    here = await site(0, 1, kv_connector="nixl")
    share = chat if path == CHATS else text
    let(here.decode, saying(COMMENT, token(0, 0), COMMENT, DONE))
    more = {"prompt": ["a", "b"]} if path != CHATS else {"n": 2}
    status, headers, body = await here.post(
        share(stream=True, **more), path, **{"x-request-id": "a"}
    )
    assert (status, headers["x-request-id"]) == (200, "a")
    assert body.count(COMMENT) == 4
    assert body.count(b"data: {") == 2
    assert b'"index":1' in body.replace(b" ", b"")


async def test_several_choices_that_have_only_comments_end_with_one_error(site: Open) -> None:
    written = BytesIO()
    here = await site(0, 1, lines=RequestLog(written, plain=False))
    let(here.decode, saying(COMMENT, dies=True))
    status, _, body = await here.post(text(stream=True, prompt=["a", "b"]))
    assert status == 200
    assert error_of(body, "/v1/completions")["code"] == 503
    assert body.count(b"data: {") == 1
    await here.app.close()
    line = json.loads(written.getvalue())
    assert (line["status"], line["outcome"], line["generated"]) == (503, "error", 0)


async def test_comments_to_a_client_that_does_not_read_fill_no_memory(site: Open) -> None:
    here, long, said = await site(0, 1), b": %b\n\n" % (b"x" * 60000), asyncio.Event()

    async def say(exchange: Exchange) -> None:
        for _ in range(1000):
            exchange.write(long)
            await exchange.drain()
        said.set()
        exchange.write(token(0, 0) + DONE)
        exchange.end()

    let(here.decode, say)
    async with here.http.post(here.url("/v1/completions"), json=text(stream=True)) as answer:
        await said.wait()  # nothing is read meanwhile
        body = await answer.read()
    assert b'" t0"' in body
    assert len(body) < 1000 * len(long)
