"""A router that stops: who is told what, what still ends, what is cut off and how."""

import asyncio
import contextlib
import io
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from tests.fakes.engine import engines
from tests.fakes.patience import until
from tests.integration.router.conftest import Json, Open, Site, text

from kvrouter.app.process import drain
from kvrouter.engines.engine import Role
from kvrouter.http.headers import SSE_HEADERS
from kvrouter.http.server.exchange import Exchange
from kvrouter.telemetry.request_log import RequestLog
from kvrouter.tools.demo.children import Child, Children

FOREVER_S = 600.0
COMPLETIONS, RESPONSES = "/v1/completions", "/v1/responses"
ASKED = {"model": "m", "input": "a"}


class Stopping:
    """A router that has been told to stop; `at_once` and `ended` are the rest of its life."""

    def __init__(self, here: Site, delay_s: float = FOREVER_S) -> None:
        self._app = here.app
        self.at_once = asyncio.Event()
        self._task = asyncio.create_task(
            drain(here.app.ports.public, delay_s=delay_s, timeout_s=FOREVER_S, at_once=self.at_once)
        )

    async def began(self) -> None:
        await until(lambda: self._app.ports.public.draining)

    async def ended(self) -> bool:
        """Whether nobody was cut off."""
        async with asyncio.timeout(20):
            whole = await self._task
            await self._app.close()
        return whole

    async def cut_off(self) -> None:
        await self.began()
        self.at_once.set()
        assert not await self.ended()


def control(here: Site) -> str:
    assert here.app.ports.control is not None
    return f"http://127.0.0.1:{here.app.ports.control.port}"


def frames(body: bytes) -> list[Json]:
    """The events of a stream that ends well."""
    *events, done, rest = body.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.partition("data: ")[2]) for event in events]


def assert_cut_off(error: Json) -> None:
    told = error["error"]
    assert (told["type"], told["code"]) == ("ServiceUnavailableError", 503)
    assert "stopping" in told["message"]


async def read_until(answer: aiohttp.ClientResponse, mark: bytes, times: int = 1) -> bytes:
    """What has come when `mark` has come so often."""
    seen = b""
    while seen.count(mark) < times:
        piece = await answer.content.readany()
        assert piece, seen
        seen += piece
    return seen


async def until_refused(here: Site) -> None:
    """Return when nobody can connect any more."""
    with contextlib.suppress(aiohttp.ClientConnectorError):
        async with asyncio.timeout(20):
            while True:
                await here.get("/live")


class Written(io.BytesIO):
    """What a router logs."""

    def lines(self) -> list[Json]:
        return [json.loads(line) for line in self.getvalue().splitlines()]


async def test_readiness_ends_at_once_on_both_ports_and_requests_are_served_on(site: Open) -> None:
    here = await site(control_port=0)
    stopping = Stopping(here)
    await stopping.began()
    for base in (here.url(""), control(here)):
        for path in ("/health", "/ready"):
            async with here.http.get(base + path) as answer:
                assert answer.status == 503
                assert (await answer.json())["status"] == "draining"
        for path in ("/live", "/ping"):
            async with here.http.get(base + path) as answer:
                assert answer.status == 200
    status, body = await here.get("/healthcheck")
    assert (status, json.loads(body)["status"]) == (503, "draining")
    async with here.http.get(control(here) + "/metrics") as answer:
        assert "kvrouter:draining 1.0" in await answer.text()
    for _ in range(2):
        status, headers, _ = await here.post(text())
        assert (status, headers["connection"]) == (200, "close")
    stopping.at_once.set()
    assert await stopping.ended()


async def test_after_the_delay_nobody_connects_and_what_is_under_way_ends(site: Open) -> None:
    here = await site(control_port=0, max_concurrent_requests=1)
    here.prefill[0].mode = "held"
    tasks = [asyncio.create_task(here.post(text()))]
    await here.prefill[0].next_began()
    tasks.append(asyncio.create_task(here.post(text(stream=True))))
    await until(lambda: here.app.core.queue_wait.waiting == 1)
    stopping = Stopping(here, delay_s=0)
    await stopping.began()
    await until_refused(here)
    async with here.http.get(control(here) + "/ready") as answer:
        assert answer.status == 503
    here.prefill[0].go.set()
    for status, headers, _ in await asyncio.gather(*tasks):
        assert (status, headers["connection"]) == (200, "close")
    assert await stopping.ended()


STREAMS: dict[str, Json] = {
    "as it comes": {},
    "with usage": {"stream_options": {"include_usage": True}},
    "of two prompts": {"prompt": ["one", "two"]},
}


@pytest.mark.parametrize("asked", STREAMS.values(), ids=STREAMS.keys())
async def test_a_stream_that_is_cut_off_ends_with_an_error_and_its_tokens_are_logged(
    site: Open, asked: Json
) -> None:
    written = Written()
    here = await site(lines=RequestLog(written, plain=False))
    here.decode[0].mode = "hang_mid"
    async with here.http.post(
        here.url(COMPLETIONS), json=text(stream=True, max_tokens=9, **asked)
    ) as answer:
        shares = len(asked.get("prompt", ["one"]))
        seen = await read_until(answer, b"\n\n", 2 * shares)
        await Stopping(here).cut_off()
        *events, last = frames(seen + await answer.read())
    assert [event["choices"][0]["text"] for event in events].count(" t1") == shares
    assert_cut_off(last)
    for _ in range(shares):
        await here.decode[0].next_left()
    [line] = written.lines()
    assert (line["status"], line["outcome"]) == (200, "cut_off")
    assert line["generated"] == 2 * shares
    assert "stopping" in line["error"]
    assert here.app.core.metrics.cut_off["stream"] == 1
    assert here.app.core.metrics.errors["200", "m"] == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_without_an_answer_yet_is_told_to_try_again(
    site: Open, stream: bool
) -> None:
    written = Written()
    here = await site(lines=RequestLog(written, plain=False), max_concurrent_requests=1)
    here.prefill[0].mode = "hang"
    tasks = [asyncio.create_task(here.post(text(stream=stream)))]
    await here.prefill[0].next_began()
    tasks.append(asyncio.create_task(here.post(text(stream=stream))))
    await until(lambda: here.app.core.queue_wait.waiting == 1)
    await Stopping(here).cut_off()
    for status, headers, body in await asyncio.gather(*tasks):
        assert (status, headers["retry-after"]) == (503, "1")
        assert "x-request-id" in headers
        assert_cut_off(json.loads(body))
    assert [line["outcome"] for line in written.lines()] == ["cut_off", "cut_off"]
    assert [line["status"] for line in written.lines()] == [503, 503]
    assert here.app.core.metrics.cut_off["none"] == 2
    assert here.app.core.metrics.errors["503", "m"] == 2


async def test_a_request_that_waits_for_an_engine_is_told_to_try_again(site: Open) -> None:
    here = await site(0, 1, engine_wait_s=FOREVER_S)
    await here.decode[0].stop()
    await until(lambda: not here.app.core.pool.engines(Role.DECODE))
    task = asyncio.create_task(here.post(text()))
    await until(lambda: here.app.core.engine_wait.waiting == 1)
    await Stopping(here).cut_off()
    status, headers, _ = await task
    assert (status, headers["retry-after"]) == (503, "1")


async def test_a_stream_of_another_endpoint_is_cut_off_after_a_whole_event(site: Open) -> None:
    written = Written()
    here = await site(lines=RequestLog(written, plain=False))

    async def page(exchange: Exchange) -> None:
        exchange.start(200, SSE_HEADERS)
        exchange.write(b'event: x\ndata: {"a": 1}\n\nevent: half')
        await asyncio.Event().wait()

    here.decode[0].pages[RESPONSES] = page
    async with here.http.post(here.url(RESPONSES), json={**ASKED, "stream": True}) as answer:
        seen = await read_until(answer, b"\n\n")
        await Stopping(here).cut_off()
        events = (seen + await answer.read()).decode().split("\n\n")
    first, last = [json.loads(event.partition("data: ")[2]) for event in events[:-1]]
    assert first == {"a": 1}
    assert_cut_off(last)
    [line] = written.lines()
    assert (line["status"], line["outcome"]) == (200, "cut_off")
    assert here.app.core.metrics.passed_through[RESPONSES, "200", "m"] == 1


async def test_a_request_of_another_endpoint_is_told_to_try_again(site: Open) -> None:
    written = Written()
    here = await site(lines=RequestLog(written, plain=False))
    asked = asyncio.Event()

    async def page(exchange: Exchange) -> None:
        del exchange
        asked.set()
        await asyncio.Event().wait()

    here.decode[0].pages[RESPONSES] = page
    task = asyncio.create_task(here.post(ASKED, RESPONSES))
    await asked.wait()
    await Stopping(here).cut_off()
    status, headers, answer = await task
    assert (status, headers["retry-after"]) == (503, "1")
    assert_cut_off(json.loads(answer))
    [line] = written.lines()
    assert (line["status"], line["outcome"]) == (503, "cut_off")
    assert here.app.core.metrics.passed_through[RESPONSES, "503", "m"] == 1


async def test_a_client_that_leaves_while_the_router_drains_was_not_cut_off(site: Open) -> None:
    written = Written()
    here = await site(lines=RequestLog(written, plain=False))
    here.decode[0].mode = "hang_mid"
    stopping = Stopping(here)
    await stopping.began()
    answer = await here.http.post(here.url(COMPLETIONS), json=text(stream=True))
    await read_until(answer, b"\n\n", 2)
    answer.close()
    await here.decode[0].next_left()
    stopping.at_once.set()
    assert await stopping.ended()
    [line] = written.lines()
    assert (line["status"], line["outcome"], line["generated"]) == (499, "client_left", 2)
    assert not here.app.core.metrics.cut_off


class Process:
    """A router before one engine that never ends a stream, and a stream of it."""

    def __init__(self, children: Children, router: Child, http: aiohttp.ClientSession) -> None:
        self._children = children
        self.router = router
        self.http = http

    async def stream(self) -> aiohttp.ClientResponse:
        answer = await self.http.post(self.router.http + COMPLETIONS, json=text(stream=True))
        await read_until(answer, b"\n\n", 2)
        return answer

    async def says(self, words: str) -> None:
        await until(lambda: words in self._children.logged(self.router))

    async def exit_code(self) -> int:
        async with asyncio.timeout(20):
            return await self.router.process.wait()


@pytest_asyncio.fixture
async def start(tmp_path: Path) -> AsyncIterator[Any]:
    """Starts a router's process with flags."""
    async with engines(1) as [engine], Children(tmp_path) as children:
        engine.mode = "hang_mid"
        async with aiohttp.ClientSession() as http:

            async def started(*flags: str) -> Process:
                router = await children.start(
                    *("router", "serve", "--port", "0", "--decode", engine.address, *flags)
                )
                return Process(children, router, http)

            yield started


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("delay", ["0", "600"])
async def test_a_second_signal_ends_the_process_at_once(
    start: Any, second: signal.Signals, delay: str
) -> None:
    made = await start("--drain-delay", delay, "--drain-timeout", "600")
    answer = await made.stream()
    os.kill(made.router.pid, signal.SIGTERM)
    await made.says("requests on 1 connections may end" if delay == "0" else "not ready")
    os.kill(made.router.pid, second)
    assert b"stopping" in await answer.read()
    assert await made.exit_code() == 0
    await made.says("after a second signal")
    await made.says('"outcome":"cut_off"')


async def test_ctrl_c_needs_no_delay(start: Any) -> None:
    made = await start("--drain-delay", "600", "--drain-timeout", "600")
    os.kill(made.router.pid, signal.SIGINT)
    assert await made.exit_code() == 0
    await made.says("drained in")


async def test_what_takes_longer_than_the_timeout_is_cut_off_by_the_process(start: Any) -> None:
    made = await start("--drain-delay", "600", "--drain-timeout", "0.2")
    answer = await made.stream()
    os.kill(made.router.pid, signal.SIGTERM)
    assert frames(await answer.read())
    assert await made.exit_code() == 0
    await made.says("after --drain-timeout 0.2")


async def test_a_signal_ends_a_router_that_still_starts() -> None:
    async with engines(1) as [silent]:
        silent.healthy.clear()
        flags = ("--decode", silent.address, "--health-timeout", "600", "--drain-delay", "600")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvrouter", "serve", "--port", "0", *flags)
        )
        await until(lambda: ("/health", None) in silent.asked)
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
