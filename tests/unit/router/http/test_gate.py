"""The gate before a server: a caller's request is under way until its handler is over."""

import asyncio
from typing import Any

import pytest
from tests.unit.router.http.conftest import Dial, Serve, hello, post

from kvrouter.access.callers import Caller, KeyRing
from kvrouter.access.gate import Gate
from kvrouter.credentials.caller_keys import Key, digest
from kvrouter.http.server.exchange import Exchange
from kvrouter.http.server.listener import Handler, HttpServer
from kvrouter.telemetry.metrics import Metrics

ASKED = post(b"{}", b"Authorization: Bearer k\r\n")


async def guarded(serve: Serve, handler: Handler, **limits: Any) -> tuple[HttpServer, Caller]:
    """A server behind a gate that lets one caller in."""
    ring = KeyRing()
    ring.follow([Key("a", (digest("k"),), **limits)])
    [caller] = ring.all()
    gate = Gate(ring, handler, Metrics(), None)
    server = await serve(gate.handle)
    server.at_head = gate.at_head
    return server, caller


class Held:
    """A handler that begins and stays until it is let go; says how often it was let in."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.go = asyncio.Event()
        self.ended = asyncio.Event()

    async def handle(self, exchange: Exchange) -> None:
        self.began.set()
        try:
            await self.go.wait()
            exchange.respond(200, b"{}")
        finally:
            self.ended.set()


async def test_a_request_is_under_way_until_it_is_answered(serve: Serve, dial: Dial) -> None:
    held = Held()
    server, caller = await guarded(serve, held.handle)
    wire = await dial(server)
    for count in (1, 2):
        wire.send(ASKED)
        await held.began.wait()
        assert (caller.running, caller.requests) == (1, count)
        held.go.set()
        assert (await wire.answer())[0] == 200
        assert caller.running == 0
        held.began.clear()
        held.go.clear()


async def test_a_request_of_a_client_that_leaves_is_over(serve: Serve, dial: Dial) -> None:
    held = Held()
    server, caller = await guarded(serve, held.handle)
    wire = await dial(server)
    wire.send(ASKED)
    await held.began.wait()
    wire.close()
    await held.ended.wait()
    await server.close()
    assert (caller.running, caller.requests) == (0, 1)


async def test_a_request_that_outlives_its_client_is_under_way_to_its_end(
    serve: Serve, dial: Dial
) -> None:
    left, go = asyncio.Event(), asyncio.Event()

    async def handler(exchange: Exchange) -> None:
        exchange.on_close(left.set)
        exchange.respond(200)
        await go.wait()

    server, caller = await guarded(serve, handler)
    wire = await dial(server)
    wire.send(ASKED)
    assert (await wire.answer())[0] == 200
    wire.close()
    await left.wait()
    assert caller.running == 1
    go.set()
    await server.close(grace_s=10)
    assert caller.running == 0


async def test_a_request_whose_handler_fails_is_over(serve: Serve, dial: Dial) -> None:
    async def awaited(exchange: Exchange) -> None:
        raise LookupError

    def called(exchange: Exchange) -> Any:
        raise LookupError

    for handler in (awaited, called):
        server, caller = await guarded(serve, handler)
        wire = await dial(server)
        wire.send(ASKED)
        assert (await wire.answer())[0] == 500
        assert (caller.running, caller.requests) == (0, 1)


async def test_a_request_whose_answer_is_cut_off_is_over(serve: Serve, dial: Dial) -> None:
    async def handler(exchange: Exchange) -> None:
        exchange.start(200)
        exchange.write(b"half")

    server, caller = await guarded(serve, handler)
    wire = await dial(server)
    wire.send(ASKED)
    headers = (await wire.head())[1]
    with pytest.raises((asyncio.IncompleteReadError, ValueError)):
        await wire.body(headers)
    assert (caller.running, caller.requests) == (0, 1)


async def test_requests_that_a_shutdown_cuts_off_are_over(serve: Serve, dial: Dial) -> None:
    held = Held()
    server, caller = await guarded(serve, held.handle)
    wire = await dial(server)
    wire.send(ASKED * 3)
    await held.began.wait()
    await server.close()
    assert held.ended.is_set()
    assert (caller.running, caller.requests) == (0, 1)


async def test_pipelined_requests_are_under_way_one_after_another(serve: Serve, dial: Dial) -> None:
    server, caller = await guarded(serve, hello, max_concurrent=1)
    wire = await dial(server)
    wire.send(ASKED * 5)
    for _ in range(5):
        assert (await wire.answer())[0] == 200
    await server.close()
    assert (caller.running, caller.requests, dict(caller.refused)) == (0, 5, {})


async def test_what_is_not_let_in_is_not_under_way_and_ends_nothing(
    serve: Serve, dial: Dial
) -> None:
    held = Held()
    server, caller = await guarded(serve, held.handle, max_concurrent=1)
    first, other = await dial(server), await dial(server)
    first.send(ASKED)
    await held.began.wait()
    other.send(ASKED)
    assert (await other.answer())[0] == 429
    for header in (b"", b"Authorization: Bearer nobodys\r\n"):
        other.send(post(b"{}", header))
        assert (await other.answer())[0] == 401
    other.send(b"GET /v1/models HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer k\r\n\r\n")
    other.send(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n")
    held.go.set()
    for wire in (first, other, other):
        assert (await wire.answer())[0] == 200
    assert (caller.running, caller.requests) == (0, 1)


UPLOAD = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 60000000\r\n%b\r\n"
GOOD = b"Authorization: Bearer k\r\n"
WRONG = b"Authorization: Bearer nobodys\r\n"
EXPECTS = b"Expect: 100-continue\r\n"


@pytest.mark.parametrize("header", [b"", WRONG, EXPECTS, WRONG + EXPECTS])
async def test_a_wrong_key_is_refused_before_its_body_comes(
    serve: Serve, dial: Dial, header: bytes
) -> None:
    server, caller = await guarded(serve, hello)
    wire = await dial(server)
    wire.send(UPLOAD % header + b"x" * 1000)
    status, headers, body = await wire.answer()
    assert (status, headers["connection"], headers["www-authenticate"]) == (401, "close", "Bearer")
    assert b'"code":"invalid_api_key"' in body
    wire.send(b"x" * 1_000_000)  # which nobody reads; it may not lose the answer
    assert await wire.at_end()
    assert (server.incoming_bytes, caller.requests) == (0, 0)


async def test_a_good_key_is_asked_for_its_body_and_a_request_of_no_use_is_not(
    serve: Serve, dial: Dial
) -> None:
    server, _ = await guarded(serve, hello)
    for path, header in ((b"/v1/completions", GOOD), (b"/health", b"")):
        wire = await dial(server)
        wire.send(b"POST %b HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n" % path)
        wire.send(EXPECTS + header + b"\r\n")
        assert (await wire.head())[0] == 100
        wire.send(b"{}")
        assert (await wire.answer())[0] == 200


async def test_a_key_behind_another_request_is_looked_at_in_its_turn(
    serve: Serve, dial: Dial
) -> None:
    held = Held()
    server, _ = await guarded(serve, held.handle)
    wire = await dial(server)
    wire.send(ASKED + post(b"{}", WRONG) + ASKED + UPLOAD % WRONG)
    held.go.set()
    answers = [await wire.answer() for _ in range(4)]
    assert [status for status, _, _ in answers] == [200, 401, 200, 401]
    assert [headers.get("connection") for _, headers, _ in answers] == [None, None, None, "close"]
    assert await wire.at_end()


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 65537\r\n", b"Transfer-Encoding: chunked\r\n"]
)
async def test_an_open_endpoint_takes_no_large_body_from_strangers(
    serve: Serve, dial: Dial, framing: bytes
) -> None:
    server, _ = await guarded(serve, hello)
    wire = await dial(server)
    wire.send(b"POST /health HTTP/1.1\r\nHost: h\r\n" + framing + b"\r\n")
    status, headers, _ = await wire.answer()
    assert (status, headers["connection"]) == (413, "close")


async def seen_behind(serve: Serve, dial: Dial, path: bytes) -> tuple[Exchange, Caller]:
    """What the handler gets of a request with a good key for `path`, and whose key it is."""
    seen: list[Exchange] = []

    async def handler(exchange: Exchange) -> None:
        seen.append(exchange)
        exchange.respond(200)

    server, caller = await guarded(serve, handler)
    wire = await dial(server)
    wire.send(ASKED.replace(b" / ", b" %b " % path))
    assert (await wire.answer())[0] == 200
    [exchange] = seen
    return exchange, caller


@pytest.mark.parametrize("path", [b"/v1/completions", b"/v1/chat/completions", b"/nothing"])
async def test_nothing_behind_the_gate_sees_the_key(serve: Serve, dial: Dial, path: bytes) -> None:
    exchange, caller = await seen_behind(serve, dial, path)
    assert exchange.principal is caller
    assert "authorization" not in exchange.headers


@pytest.mark.parametrize("path", [b"/metrics", b"/workers", b"/workers/a"])
async def test_what_is_open_is_seen_as_it_came(serve: Serve, dial: Dial, path: bytes) -> None:
    exchange, caller = await seen_behind(serve, dial, path)
    assert exchange.principal is None
    assert exchange.headers["authorization"] == "Bearer k"
    assert caller.requests == 0
