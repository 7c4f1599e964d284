"""The HTTP server, over real sockets."""

import asyncio
import socket
import struct

import pytest
from tests.unit.router.http.conftest import GET, Dial, Serve, hello, post

from kvrouter.http.headers import SSE_HEADERS
from kvrouter.http.server.exchange import Exchange
from kvrouter.http.server.listener import HttpServer
from kvrouter.http.server.routes import Routes


async def test_a_request_reaches_the_handler_whole(serve: Serve, dial: Dial) -> None:
    seen: list[Exchange] = []

    async def handler(exchange: Exchange) -> None:
        seen.append(exchange)
        exchange.respond(200, b"ok", content_type="text/plain", headers=[("x-a", "b")])

    server = await serve(handler)
    wire = await dial(server)
    wire.send(b"POST /p/q?a=b HTTP/1.1\r\nHost: h\r\nX-One: 1\r\nx-one: 2\r\n")
    wire.send(b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\nTrail: x\r\n\r\n")
    status, headers, body = await wire.answer()
    assert (status, body) == (200, b"ok")
    assert headers["content-type"] == "text/plain"
    assert headers["x-a"] == "b"
    assert headers["date"].endswith("GMT")
    (exchange,) = seen
    assert (exchange.method, exchange.path, exchange.query) == ("POST", "/p/q", "a=b")
    assert exchange.headers["x-one"] == "1, 2"
    assert "trail" not in exchange.headers
    assert exchange.body == b"abcde"
    assert exchange.peer.startswith("127.0.0.1:")


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("/v1/models/", "/v1/models"),
        ("/v1/models/?a=b/", "/v1/models"),
        ("http://h/v1/models/", "/v1/models"),
        ("/v1/models", "/v1/models"),
        ("/", "/"),
        ("//", "/"),
        ("/v1//", "/v1/"),
    ],
)
async def test_a_slash_at_the_end_of_a_path_means_nothing(
    serve: Serve, dial: Dial, target: str, path: str
) -> None:
    async def handler(exchange: Exchange) -> None:
        exchange.respond(200, exchange.path.encode())

    wire = await dial(await serve(handler))
    wire.send(b"GET %b HTTP/1.1\r\nHost: h\r\n\r\n" % target.encode())
    assert (await wire.answer())[2] == path.encode()


async def test_a_connection_is_kept_for_the_next_request(serve: Serve, dial: Dial) -> None:
    server = await serve(hello)
    wire = await dial(server)
    for _ in range(3):
        wire.send(GET)
        assert (await wire.answer())[2] == b'"hello"'
    assert server.connections == 1


async def test_connection_close_and_http_1_0_end_the_connection(serve: Serve, dial: Dial) -> None:
    server = await serve(hello)
    for request in (
        b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n",
        b"GET / HTTP/1.0\r\n\r\n",
    ):
        wire = await dial(server)
        wire.send(request)
        status, headers, _ = await wire.answer()
        assert (status, headers["connection"]) == (200, "close")
        assert await wire.at_end()


async def test_pipelined_requests_are_answered_one_after_another_in_order(
    serve: Serve, dial: Dial
) -> None:
    running = 0

    async def handler(exchange: Exchange) -> None:
        nonlocal running
        running += 1
        assert running == 1
        await asyncio.sleep(0)
        exchange.respond(200, exchange.path.encode())
        running -= 1

    server = await serve(handler)
    wire = await dial(server)
    wire.send(
        b"".join(b"GET /%d HTTP/1.1\r\nHost: h\r\nX-N: %d\r\n\r\n" % (i, i) for i in range(20))
    )
    for i in range(20):
        assert (await wire.answer())[2] == b"/%d" % i


async def test_a_stream_is_chunked_and_whole(serve: Serve, dial: Dial) -> None:
    async def handler(exchange: Exchange) -> None:
        exchange.start(200, SSE_HEADERS)
        for i in range(3):
            exchange.write(b"data: %d\n\n" % i)
            await asyncio.sleep(0)
        exchange.write(b"x" * 100_000)
        exchange.end()

    server = await serve(handler)
    wire = await dial(server)
    for _ in range(2):
        wire.send(GET)
        status, headers, body = await wire.answer()
        assert status == 200
        assert headers["content-type"] == "text/event-stream; charset=utf-8"
        assert headers["cache-control"] == "no-cache"
        assert headers["x-accel-buffering"] == "no"
        assert body == b"data: 0\n\ndata: 1\n\ndata: 2\n\n" + b"x" * 100_000


@pytest.mark.parametrize("pieces", [[], [b"abc"], [b"a", b"bc"], [b"x" * 50_000]])
async def test_a_head_that_is_held_goes_with_the_first_bytes(
    serve: Serve, dial: Dial, pieces: list[bytes]
) -> None:
    async def handler(exchange: Exchange) -> None:
        exchange.start(200, hold=True)
        for piece in pieces:
            exchange.write(piece)
        exchange.end()

    server = await serve(handler)
    wire = await dial(server)
    for _ in range(2):
        wire.send(GET)
        assert (await wire.answer())[2] == b"".join(pieces)


async def test_a_stream_to_http_1_0_ends_with_the_connection(serve: Serve, dial: Dial) -> None:
    async def handler(exchange: Exchange) -> None:
        exchange.start(200)
        exchange.write(b"abc")
        exchange.end()

    server = await serve(handler)
    wire = await dial(server)
    wire.send(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    _, headers, body = await wire.answer()
    assert "transfer-encoding" not in headers
    assert body == b"abc"


async def test_a_client_that_leaves_cancels_the_handler_at_once(serve: Serve, dial: Dial) -> None:
    events: asyncio.Queue[str] = asyncio.Queue()

    async def handler(exchange: Exchange) -> None:
        exchange.on_close(lambda: events.put_nowait("closed"))
        events.put_nowait("began")
        try:
            await asyncio.Event().wait()
        finally:
            assert exchange.closed
            events.put_nowait("cancelled")

    server = await serve(handler)
    wire = await dial(server)
    wire.send(post(b"{}"))
    async with asyncio.timeout(5):
        assert await events.get() == "began"
        wire.writer.close()
        assert await events.get() == "closed"
        assert await events.get() == "cancelled"


@pytest.mark.parametrize(
    "behind",
    [
        post(b"{}"),
        post(b"{}") * 5,
        GET * 500,
        post(b"x" * 500_000),
        post(b"{}")[:-1],
        b"\x00\x01 garbage\r\n\r\n",
        b"x" * 500_000,
    ],
    ids=["a request", "5 requests", "500 requests", "500 kB", "half", "garbage", "500 kB garbage"],
)
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("leave", ["close", "reset", "half"])
async def test_a_client_that_leaves_is_noticed_whatever_it_sent_behind_its_request(
    serve: Serve, dial: Dial, behind: bytes, together: bool, leave: str
) -> None:
    began, cancelled = asyncio.Event(), asyncio.Event()

    async def handler(exchange: Exchange) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            assert exchange.closed
            cancelled.set()

    server = await serve(handler)
    wire = await dial(server)
    wire.send(post(b"{}") + (behind if together else b""))
    async with asyncio.timeout(10):
        await began.wait()
        wire.send(b"" if together else behind)
        await wire.writer.drain()
        if leave == "half":
            wire.writer.write_eof()
        elif leave == "close":
            wire.writer.close()
        else:
            linger = wire.writer.get_extra_info("socket")
            linger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            wire.writer.transport.abort()
        await cancelled.wait()
        while server.connections:
            await asyncio.sleep(0)


async def test_a_handler_that_fails_is_a_500_or_a_cut_off_answer(serve: Serve, dial: Dial) -> None:
    async def handler(exchange: Exchange) -> None:
        if exchange.path == "/late":
            exchange.start(200)
            exchange.write(b"abc")
        raise LookupError("a secret")

    server = await serve(handler)
    wire = await dial(server)
    wire.send(GET)
    status, headers, body = await wire.answer()
    assert (status, headers["connection"]) == (500, "close")
    assert b"secret" not in body
    wire = await dial(server)
    wire.send(b"GET /late HTTP/1.1\r\nHost: h\r\n\r\n")
    _, headers = await wire.head()
    with pytest.raises((asyncio.IncompleteReadError, ValueError)):
        await wire.body(headers)


async def test_a_handler_that_does_not_end_its_answer_cuts_it_off(serve: Serve, dial: Dial) -> None:
    async def handler(exchange: Exchange) -> None:
        exchange.start(200)

    server = await serve(handler)
    wire = await dial(server)
    wire.send(GET)
    await wire.head()
    assert await wire.at_end()


async def test_a_slow_reader_pauses_the_producer_and_memory_stays_bounded(
    serve: Serve, dial: Dial
) -> None:
    written = 0
    paused = asyncio.Event()
    chunk = b"x" * 65536

    async def handler(exchange: Exchange) -> None:
        nonlocal written
        exchange.start(200)
        for _ in range(1024):
            exchange.write(chunk)
            written += len(chunk)
            if exchange.paused:
                paused.set()
            await exchange.drain()
        exchange.end()

    server = await serve(handler, write_buffer_bytes=65536)
    wire = await dial(server)
    wire.send(GET)
    async with asyncio.timeout(10):
        await paused.wait()
    assert written < 32 * 1024 * 1024
    _, headers = await wire.head()
    assert len(await wire.body(headers)) == 1024 * 65536


async def test_a_reader_that_stops_is_dropped_after_its_deadline(serve: Serve, dial: Dial) -> None:
    ended = asyncio.Event()

    async def handler(exchange: Exchange) -> None:
        exchange.start(200)
        try:
            while True:
                exchange.write(b"x" * 65536)
                await exchange.drain()
        finally:
            ended.set()

    server = await serve(handler, write_timeout_s=0.05, write_buffer_bytes=65536)
    wire = await dial(server)
    wire.send(GET)
    async with asyncio.timeout(10):
        await ended.wait()
    wire.close()


@pytest.mark.parametrize(
    "sent", [b"GET / HT", b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\nabc"]
)
async def test_a_request_that_stays_half_written_is_a_408(
    serve: Serve, dial: Dial, sent: bytes
) -> None:
    server = await serve(hello, head_timeout_s=0.02, body_timeout_s=0.02)
    wire = await dial(server)
    wire.send(sent)
    status, headers, _ = await wire.answer()
    assert (status, headers["connection"]) == (408, "close")
    assert await wire.at_end()


async def test_an_idle_connection_is_closed_quietly(serve: Serve, dial: Dial) -> None:
    server = await serve(hello, idle_timeout_s=0.02)
    wire = await dial(server)
    assert await wire.at_end()
    wire = await dial(server)
    wire.send(GET)
    await wire.answer()
    assert await wire.at_end()


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (
            b"POST / HTTP/1.1\r\nHost: h\r\n"
            b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
            400,
        ),
        (b"GET / HTTP/1.1\r\nHost: h\r\nA: " + b"x" * 3000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: h\r\nA: " + b"x" * 9000, 431),
        (
            b"GET / HTTP/1.1\r\nHost: h\r\n"
            + b"".join(b"A%d: x\r\n" % i for i in range(20))
            + b"\r\n",
            431,
        ),
        (b"GET /" + b"x" * 9000, 414),
        (b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1001\r\n\r\n", 413),
        (
            b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3ea\r\n"
            + b"x" * 1002,
            413,
        ),
    ],
)
async def test_what_breaks_the_limits_is_refused(
    serve: Serve, dial: Dial, sent: bytes, status: int
) -> None:
    server = await serve(hello, head_bytes=2048, headers=16, body_bytes=1000)
    wire = await dial(server)
    wire.send(sent)
    got, headers, body = await wire.answer()
    assert (got, headers["connection"]) == (status, "close")
    assert b'"error"' in body
    assert await wire.at_end()


async def test_too_many_connections_are_told_so(serve: Serve, dial: Dial) -> None:
    server = await serve(hello, connections=1)
    first = await dial(server)
    first.send(GET)
    await first.answer()
    second = await dial(server)
    second.send(GET)
    assert (await second.answer())[0] == 503
    first.send(GET)
    assert (await first.answer())[0] == 200


async def test_a_request_too_many_takes_a_place_that_comes_free(serve: Serve, dial: Dial) -> None:
    server = await serve(hello, connections=1)
    first, second = await dial(server), await dial(server)
    first.send(GET)
    await first.answer()
    second.send(GET[:9])
    while not server.refused:
        await asyncio.sleep(0)
    first.writer.close()
    second.send(GET[9:])
    assert (await second.answer())[0] == 200
    assert (server.connections, server.refused) == (1, 0)


async def busy(exchange: Exchange) -> None:
    """Holds its connection, as a stream does."""
    exchange.start(200)
    exchange.write(b"begun")
    await asyncio.Event().wait()


async def holding(serve: Serve, dial: Dial, **limits: float) -> HttpServer:
    """A server whose only connection streams."""
    server = await serve(busy, connections=1, **limits)
    stream = await dial(server)
    stream.send(GET)
    await stream.head()
    return server


async def test_a_request_too_many_reads_why_and_no_reset(serve: Serve, dial: Dial) -> None:
    server = await holding(serve, dial)
    wire = await dial(server)
    wire.send(post(b"x" * 500_000))
    status, headers, _ = await wire.answer()
    assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
    assert await wire.at_end()


async def test_only_so_many_of_the_refused_stay_for_a_moment(serve: Serve, dial: Dial) -> None:
    server = await holding(serve, dial, refused=2)
    for count in (1, 2, 2, 2):
        wire = await dial(server)
        wire.send(GET)
        assert (await wire.answer())[0] == 503
        assert server.refused == count


@pytest.mark.parametrize("sent", [b"", GET[:9]])
async def test_a_silent_connection_makes_way_for_a_request(
    serve: Serve, dial: Dial, sent: bytes
) -> None:
    server = await serve(hello, connections=2, patience_s=0)
    silent = [await dial(server) for _ in range(2)]
    for wire in silent:
        wire.send(GET)
        await wire.answer()
        wire.send(sent)
    wire = await dial(server)
    wire.send(GET)
    assert (await wire.answer())[0] == 200
    assert [(await each.answer())[0] for each in silent] == [503, 503]


@pytest.mark.slow
async def test_a_request_in_progress_makes_way_for_nobody(serve: Serve, dial: Dial) -> None:
    server = await holding(serve, dial, patience_s=0)
    assert (await (await dial(server)).answer())[0] == 503
    assert server.connections == 1


async def test_an_expectation_is_answered_before_the_body_comes(serve: Serve, dial: Dial) -> None:
    server = await serve(hello)
    wire = await dial(server)
    wire.send(b"POST / HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
    assert await wire.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    wire.send(b"{}")
    assert (await wire.answer())[0] == 200


@pytest.mark.parametrize(
    ("framing", "body"),
    [
        (b"", b""),
        (b"Content-Length: 0\r\n", b""),
        (b"Content-Length: 5\r\n", b"abcde"),
        (b"Transfer-Encoding: chunked\r\n", b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"),
    ],
    ids=["no body", "length 0", "length", "chunks"],
)
@pytest.mark.parametrize("cut", [0, 3])
async def test_a_request_to_upgrade_is_served_as_any_other(
    serve: Serve, dial: Dial, framing: bytes, body: bytes, cut: int
) -> None:
    async def handler(exchange: Exchange) -> None:
        exchange.respond(200, exchange.path.encode() + exchange.body)

    server = await serve(handler)
    wire = await dial(server)
    for path in (b"/a", b"/b"):
        wire.send(b"POST %b HTTP/1.1\r\nHost: h\r\n%b" % (path, framing))
        wire.send(b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n" + body[:cut])
        await asyncio.sleep(0)
        wire.send(body[cut:])
        status, headers, said = await wire.answer()
        assert (status, said) == (200, path + (b"abcde" if body else b""))
        assert "connection" not in headers
    wire.send(GET + GET)
    assert (await wire.answer())[2] == (await wire.answer())[2] == b"/x"


async def test_nothing_behind_a_connect_is_read(serve: Serve, dial: Dial) -> None:
    server = await serve(hello)
    wire = await dial(server)
    wire.send(b"CONNECT h:443 HTTP/1.1\r\nHost: h\r\n\r\n" + GET)
    assert (await wire.answer())[1]["connection"] == "close"
    assert await wire.at_end()


async def test_routes_know_paths_and_methods(serve: Serve, dial: Dial) -> None:
    server = await serve(Routes([("GET", "/x", hello), ("POST", "/y", hello)]).handle)
    wire = await dial(server)
    wire.send(GET)
    assert (await wire.answer())[0] == 200
    wire.send(b"GET /y HTTP/1.1\r\nHost: h\r\n\r\n")
    status, headers, _ = await wire.answer()
    assert (status, headers["allow"]) == (405, "POST")
    wire.send(b"GET /z HTTP/1.1\r\nHost: h\r\n\r\n")
    assert (await wire.answer())[0] == 404
    wire.send(b"HEAD /x HTTP/1.1\r\nHost: h\r\n\r\n")
    status, headers = await wire.head()
    assert (status, headers["content-length"]) == (200, "7")
    wire.send(GET)
    assert (await wire.answer())[2] == b'"hello"'


@pytest.mark.parametrize("value", ["a\r\nb: c", "a\nb", "a\0"])
async def test_a_header_cannot_be_forged_through_its_value(
    serve: Serve, dial: Dial, value: str
) -> None:
    async def handler(exchange: Exchange) -> None:
        with pytest.raises(ValueError, match="line break"):
            exchange.respond(200, b"", headers=[("x-a", value)])

    server = await serve(handler)
    wire = await dial(server)
    wire.send(GET)
    assert await wire.at_end()
