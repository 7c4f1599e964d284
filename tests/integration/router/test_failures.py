"""Engines that die, hang or refuse; clients that leave; budgets that are spent."""

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable

import pytest
from tests.fakes.patience import until
from tests.integration.router.conftest import Open, metric, text

from kvrouter.engines.breaker import BreakerState
from kvrouter.engines.engine import Role
from kvrouter.http.server.exchange import Exchange
from kvrouter.openai.endpoints import COMPLETIONS

Page = Callable[[Exchange], Awaitable[None]]

MODES = ("500", "drop", "drop_head", "drop_mid", "garbage")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", MODES)
async def test_a_failed_prefill_leg_is_recomputed_by_decode(
    site: Open, mode: str, stream: bool
) -> None:
    here = await site()
    here.prefill[0].mode = mode
    status, _, body = await here.post(text(stream=stream))
    assert status == 200
    assert b" t3" in body
    assert await metric(here, 'kvrouter:upstream_errors_total{leg="prefill"') == 1
    assert await metric(here, "kvrouter:recompute_tokens") == 0


async def test_a_prefill_engine_that_is_gone_costs_its_request_nothing(site: Open) -> None:
    here = await site(2, 1)
    await here.prefill[0].stop()
    for _ in range(4):
        status, _, _ = await here.post(text())
        assert status == 200
    assert len(here.prefill[1].requests) == 4


async def test_a_prefill_engine_that_cannot_be_reached_costs_its_request_nothing(
    site: Open,
) -> None:
    here = await site(2, 1)
    gone = here.app.core.pool.find(here.prefill[0].address)
    assert gone is not None
    gone.host = "255.255.255.255"  # no network leads there
    here.app.core.client.forget(gone)  # which may know where it was
    for _ in range(4):
        assert (await here.post(text()))[0] == 200
    assert len(here.prefill[1].requests) == 4
    assert await metric(here, 'kvrouter:upstream_errors_total{leg="prefill",reason="connect"}') >= 1


async def test_without_budget_a_failed_prefill_leg_goes_to_another_engine(site: Open) -> None:
    here = await site(2, 1, recompute_budget_tokens=0)
    here.prefill[0].mode = "500"
    for _ in range(4):
        assert (await here.post(text()))[0] == 200
    assert len(here.decode[0].requests) == 4
    assert len(here.prefill[1].requests) == 4


async def test_a_prefill_engine_that_is_full_costs_its_request_nothing(site: Open) -> None:
    here = await site(2, 1)
    here.prefill[0].pages["/v1/completions"] = answering(b"{}", "application/json", 429)
    for _ in range(4):
        assert (await here.post(text()))[0] == 200
    assert len(here.prefill[1].requests) == 4
    assert await metric(here, 'kvrouter:upstream_errors_total{leg="prefill",reason="full"}') >= 1


async def test_without_budget_and_without_engines_the_client_is_asked_to_wait(site: Open) -> None:
    here = await site(1, 1, recompute_budget_tokens=0)
    here.prefill[0].mode = "drop"
    status, headers, body = await here.post(text())
    assert status == 429
    assert int(headers["retry-after"]) >= 1
    assert json.loads(body)["error"]["code"] == 429
    assert here.decode[0].requests == []


async def test_prefill_engines_that_are_all_away_are_done_without_within_the_budget(
    site: Open,
) -> None:
    here = await site(1, 1, recompute_budget_tokens=0)
    await here.prefill[0].stop()
    await until(lambda: not here.app.core.pool.engines(Role.PREFILL))
    assert (await here.post(text()))[0] == 429
    status, body = await here.get("/health")
    assert (status, json.loads(body)["status"]) == (200, "degraded")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", ["500", "drop", "drop_head"])
async def test_a_decode_engine_that_dies_before_the_first_byte_is_replaced_silently(
    site: Open, mode: str, stream: bool
) -> None:
    here = await site(1, 2)
    here.decode[0].mode = mode
    for _ in range(2):  # the turn of either engine
        status, _, body = await here.post(text(stream=stream))
        assert status == 200
        assert b" t3" in body
    assert len(here.decode[1].requests) == 2
    assert here.decode[0].requests
    assert len(here.prefill[0].requests) == 2


async def test_a_prompt_that_another_decode_engine_cannot_compute_alone_is_prefilled(
    site: Open,
) -> None:
    here = await site(1, 2, prefill_threshold=60, policy="least_tokens")
    here.decode[1].mode = "held"
    here.decode[0].mode = "500"
    busy = here.app.core.pool.find(here.decode[1].address)
    assert busy is not None
    others = here.app.core.pool.reserve(busy, 200, computing_tokens=50)
    here.decode[1].go.set()
    assert (await here.post(text(prompt=[7] * 50)))[0] == 200
    assert [len(e.requests) for e in (*here.prefill, *here.decode)] == [1, 1, 1]
    others.release()


def answering(body: bytes, content_type: str, status: int = 200, **headers: str) -> Page:
    fields = [(name.replace("_", "-"), value) for name, value in headers.items()]

    async def page(exchange: Exchange) -> None:
        if content_type == "text/event-stream":
            exchange.start(status, [("content-type", content_type), *fields])
            exchange.write(body)
            exchange.end()
        else:
            exchange.respond(status, body, content_type=content_type, headers=fields)

    return page


ZIPPED = gzip.compress(b'{"choices": []}')
UNUSABLE = [
    pytest.param(answering(b"", "application/json"), False, id="empty"),
    pytest.param(answering(b"<html>hi</html>", "text/html"), False, id="html"),
    pytest.param(answering(b"null", "application/json"), False, id="null"),
    pytest.param(answering(ZIPPED, "application/json", content_encoding="gzip"), False, id="gzip"),
    pytest.param(answering(b"", "text/event-stream"), True, id="empty stream"),
    pytest.param(answering(b"{}", "application/json"), True, id="json for a stream"),
    pytest.param(
        answering(ZIPPED, "text/event-stream", content_encoding="gzip"), True, id="gzip stream"
    ),
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
@pytest.mark.parametrize(("page", "stream"), UNUSABLE)
async def test_an_answer_that_nobody_can_read_is_a_failed_leg(
    site: Open, page: Page, stream: bool, path: str
) -> None:
    here = await site(0, 1)
    here.decode[0].pages[path] = page
    status, _, body = await here.post(text(stream=stream), path)
    if path == "/v1/responses" and stream and b"{}" in body:
        return  # there the engine says what kind of answer it is
    assert status == 502
    assert json.loads(body)["error"]["message"] == "The engine's answer cannot be served."
    assert await metric(here, 'kvrouter:upstream_errors_total{leg="decode",reason="answer"}') >= 1


@pytest.mark.parametrize(("page", "stream"), UNUSABLE)
async def test_after_an_answer_that_nobody_can_read_another_engine_is_asked(
    site: Open, page: Page, stream: bool
) -> None:
    here = await site(1, 2)
    here.decode[0].pages["/v1/completions"] = page
    for _ in range(2):  # the turn of either engine
        status, _, body = await here.post(text(stream=stream))
        assert status == 200
        assert b" t3" in body


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
async def test_a_refusal_that_nobody_can_read_is_told_by_its_status(site: Open, path: str) -> None:
    here = await site(0, 1)
    page = answering(ZIPPED, "application/json", 413, content_encoding="gzip")
    here.decode[0].pages[path] = page
    status, _, body = await here.post(text(), path)
    assert (status, json.loads(body)["error"]["code"]) == (413, 413)


async def test_a_whole_answer_that_breaks_off_comes_from_another_engine(site: Open) -> None:
    here = await site(1, 2)
    here.decode[0].mode = "drop_mid"
    for _ in range(2):
        assert (await here.post(text()))[0] == 200


async def test_a_stream_that_breaks_off_ends_with_an_error_event(site: Open) -> None:
    here = await site()
    here.decode[0].mode = "drop_mid"
    status, _, body = await here.post(text(stream=True))
    assert status == 200
    frames = body.split(b"\n\n")
    assert frames[-2:] == [b"data: [DONE]", b""]
    error = json.loads(frames[-3].removeprefix(b"data: "))["error"]
    assert error["code"] == 502
    assert await metric(here, 'kvrouter:upstream_errors_total{leg="decode"') == 1
    assert await metric(here, "kvrouter:request_success_total") == 0


async def test_streams_that_break_off_open_the_engines_breaker(site: Open) -> None:
    here = await site()
    here.decode[0].mode = "drop_mid"
    for _ in range(3):
        await here.post(text(stream=True))
    engine = here.app.core.pool.find(here.decode[0].address)
    assert engine is not None
    assert here.app.core.pool.state(engine) is BreakerState.OPEN


async def test_a_stream_that_stops_ends_with_an_error_event_after_its_deadline(
    site: Open,
) -> None:
    here = await site(request_timeout_s=0.3)
    here.decode[0].mode = "hang_mid"
    _, _, body = await here.post(text(stream=True))
    assert body.count(b"data: ") == 4
    assert b'"code":502' in body


async def test_an_engine_that_never_answers_is_a_504(site: Open) -> None:
    here = await site(request_timeout_s=0.3)
    here.decode[0].mode = "hang"
    status, _, body = await here.post(text())
    assert (status, json.loads(body)["error"]["code"]) == (504, 504)
    await here.decode[0].next_left()


async def test_without_decode_engines_the_client_is_asked_to_wait(site: Open) -> None:
    here = await site()
    await here.decode[0].stop()
    await here.post(text())
    status, headers, body = await here.post(text())
    assert status == 503
    assert headers["retry-after"] == "1"
    assert json.loads(body)["error"]["type"] == "ServiceUnavailableError"
    status, body = await here.get("/health")
    assert status == 503
    assert "decode" in json.loads(body)["reason"]


async def test_an_engine_that_comes_back_is_used_again(site: Open) -> None:
    here = await site()
    await here.decode[0].stop()
    assert (await here.post(text()))[0] == 503
    await here.decode[0].start()
    await until(lambda: here.app.core.pool.engines(Role.DECODE))
    assert (await here.post(text()))[0] == 200


async def test_a_connection_that_went_stale_is_made_anew(site: Open) -> None:
    here = await site()
    await here.post(text())
    for engine in (*here.prefill, *here.decode):
        await engine.stop()
        await engine.start()
    status, _, _ = await here.post(text())
    assert status == 200


async def test_a_client_that_leaves_during_prefill_ends_the_leg_there(site: Open) -> None:
    here = await site()
    here.prefill[0].mode = "hang"
    task = asyncio.create_task(here.post(text()))
    await here.prefill[0].next_began()
    task.cancel()
    await here.prefill[0].next_left()
    await until(lambda: here.app.core.metrics.running == 0)
    assert here.decode[0].requests == []
    assert await metric(here, 'kvrouter:request_errors_total{code="499",') == 1


@pytest.mark.parametrize(("mode", "stream"), [("hang", False), ("hang", True), ("hang_mid", True)])
async def test_a_client_that_leaves_during_decode_ends_the_leg_there(
    site: Open, mode: str, stream: bool
) -> None:
    here = await site()
    here.decode[0].mode = mode
    task = asyncio.create_task(here.post(text(stream=stream)))
    await here.decode[0].next_began()
    task.cancel()
    await here.decode[0].next_left()
    await until(lambda: here.app.core.metrics.running == 0)


async def test_a_slow_reader_slows_its_engine_and_nobody_else(site: Open) -> None:
    here = await site()
    engine = here.decode[0]
    engine.event_bytes, engine.events = 65536, 1000
    async with here.http.post(here.url("/v1/completions"), json=text(stream=True)) as slow:
        async with asyncio.timeout(20):
            await engine.paused.wait()
        engine.events = 2
        assert (await here.post(text(stream=True)))[0] == 200
        engine.events = 1000
        body = await slow.read()
    assert body.count(b"data: ") == 1001
    assert body.endswith(b"data: [DONE]\n\n")


async def test_requests_beyond_the_limit_are_told_to_wait(site: Open) -> None:
    here = await site(max_concurrent_requests=1, queue_size=0)
    here.prefill[0].mode = "hang"
    task = asyncio.create_task(here.post(text()))
    await here.prefill[0].next_began()
    status, headers, _ = await here.post(text())
    assert (status, headers["retry-after"]) == (429, "1")
    task.cancel()
    await here.prefill[0].next_left()


async def test_half_a_request_reaches_no_engine(site: Open) -> None:
    here = await site()
    _, writer = await asyncio.open_connection("127.0.0.1", here.port)
    writer.write(b'POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 99\r\n\r\n{"model"')
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert (await here.post(text()))[0] == 200
    assert len(here.prefill[0].requests) == 1


async def test_bodies_that_are_half_in_take_no_more_than_max_body_memory(site: Open) -> None:
    here = await site(max_body_memory="300KB")
    half = (
        b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 250000\r\n\r\n"
        + b" " * 200_000
    )
    _, first = await asyncio.open_connection("127.0.0.1", here.port)
    first.write(half)
    async with asyncio.timeout(10):
        while b"kvrouter:incoming_body_bytes 200000.0" not in (await here.get("/metrics"))[1]:
            await asyncio.sleep(0)
    reader, second = await asyncio.open_connection("127.0.0.1", here.port)
    second.write(half)
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nretry-after: 1\r\n" in answer
    assert (await here.post(text()))[0] == 200
    for writer in (first, second):
        writer.close()
        await writer.wait_closed()


async def test_a_body_that_can_never_fit_is_told_so_and_not_to_try_again(site: Open) -> None:
    here = await site(max_body_memory="300KB")
    reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 300001\r\n\r\n")
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"retry-after" not in answer
    writer.close()
    await writer.wait_closed()


async def test_the_budget_is_whole_after_engines_that_came_back_and_failed(site: Open) -> None:
    """A decode engine breaks, which was to compute; the prefill engine that is back fails too."""
    here = await site(1, 2, health_interval_s=60.0, recompute_budget_tokens=150)
    pool, prompt = here.app.core.pool, text(prompt=list(range(100)))
    prefill = pool.find(here.prefill[0].address)
    assert prefill is not None
    assert prefill.identity is not None
    identity, here.prefill[0].mode = prefill.identity, "drop"

    async def break_off(exchange: Exchange) -> None:
        for engine in here.decode:
            engine.pages.clear()
        pool.join(prefill, identity)
        exchange.abort()

    for _ in range(2):
        pool.leave(prefill)
        for engine in here.decode:
            engine.pages[COMPLETIONS] = break_off
        assert (await here.post(prompt))[0] == 200
    assert await metric(here, "kvrouter:recompute_tokens") == 0
