"""Requests that nobody sends by accident: refused, or read as RFC 9112 says, never as two."""

import asyncio
import tracemalloc
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.fakes.patience import taken, until
from tests.unit.router.http.conftest import GET, Dial, Serve, Wire, hello, post

from kvrouter.http.server.exchange import Exchange
from kvrouter.http.server.listener import HttpServer

SECOND = b"GET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n"
LIMITS: dict[str, Any] = {"head_bytes": 2048, "headers": 16, "body_bytes": 1000}


def framed(*lines: bytes, body: bytes = b"") -> bytes:
    return (
        b"POST / HTTP/1.1\r\nHost: h\r\n" + b"".join(b"%b\r\n" % x for x in lines) + b"\r\n" + body
    )


AMBIGUOUS = {
    "a length and chunks": framed(
        b"Content-Length: 4", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n" + SECOND
    ),
    "chunks and a length": framed(
        b"Transfer-Encoding: chunked", b"Content-Length: 40", body=b"0\r\n\r\n" + SECOND
    ),
    "two lengths": framed(b"Content-Length: 0", b"Content-Length: 35", body=SECOND),
    "a list of lengths": framed(b"Content-Length: 0, 35", body=SECOND),
    "a length with a sign": framed(b"Content-Length: +0", body=SECOND),
    "a negative length": framed(b"Content-Length: -1", body=SECOND),
    "a length in hexadecimal": framed(b"Content-Length: 0x0", body=SECOND),
    "a length beyond 64 bits": framed(b"Content-Length: 18446744073709551616", body=SECOND),
    "an empty length": framed(b"Content-Length:", body=SECOND),
    "a length in words": framed(b"Content-Length: many", body=SECOND),
    "a space before the colon": framed(b"Content-Length : 0", body=SECOND),
    "an encoding with a space before its colon": framed(
        b"Transfer-Encoding : chunked", body=b"0\r\n\r\n" + SECOND
    ),
    "an unknown encoding": framed(b"Transfer-Encoding: xchunked", body=b"0\r\n\r\n" + SECOND),
    "chunks that are not the last encoding": framed(
        b"Transfer-Encoding: chunked, identity", body=b"0\r\n\r\n" + SECOND
    ),
    "an encoding on a folded line": framed(
        b"Transfer-Encoding:", b" chunked", body=b"0\r\n\r\n" + SECOND
    ),
    "a folded header": framed(b"A: b", b" Content-Length: 35", body=SECOND),
    "a NUL in a header": framed(b"A: b\0c", body=SECOND),
    "a NUL in a header's name": framed(b"A\0: b", body=SECOND),
    "a header without a name": framed(b": b", body=SECOND),
    "a header without a colon": framed(b"Content-Length 35", body=SECOND),
    "a carriage return in a header": framed(b"A: b\rContent-Length: 35", body=SECOND),
    "a chunk size with a sign": framed(b"Transfer-Encoding: chunked", body=b"+0\r\n\r\n" + SECOND),
    "a chunk size with a prefix": framed(
        b"Transfer-Encoding: chunked", body=b"0x0\r\n\r\n" + SECOND
    ),
    "a chunk size beyond 64 bits": framed(
        b"Transfer-Encoding: chunked", body=b"10000000000000000\r\n\r\n" + SECOND
    ),
    "a chunk that does not end": framed(
        b"Transfer-Encoding: chunked", body=b"1\r\nab0\r\n\r\n" + SECOND
    ),
    "a chunk that ends with a line feed": framed(
        b"Transfer-Encoding: chunked", body=b"1\na0\n\n" + SECOND
    ),
    "a length behind the chunks": framed(
        b"Transfer-Encoding: chunked", body=b"0\r\nContent-Length: 35\r\n\r\n" + SECOND
    ),
    "an empty chunk size": framed(b"Transfer-Encoding: chunked", body=b"\r\n\r\n" + SECOND),
    "another coding before the chunks": framed(
        b"Transfer-Encoding: gzip, chunked", body=b"0\r\n\r\n" + SECOND
    ),
    "chunks in HTTP/1.0": b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    + SECOND,
    "no host": b"POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n" + SECOND,
    "two hosts": framed(b"Host: other", body=SECOND),
    "a host twice": framed(b"Host: h", body=SECOND),
    "a host and none": framed(b"Host:", body=SECOND),
    "a host with a blank": b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n" + SECOND,
    "a host with a path": b"GET / HTTP/1.1\r\nHost: a/b\r\n\r\n" + SECOND,
    "another version": b"POST / HTTP/9.9\r\nContent-Length: 0\r\n\r\n" + SECOND,
    "no version": b"POST /\r\n\r\n" + SECOND,
    "no target": b"POST HTTP/1.1\r\n\r\n" + SECOND,
    "a method of letters nobody has": b"MAGIC / HTTP/1.1\r\n\r\n" + SECOND,
    "a method in small letters": b"post / HTTP/1.1\r\nContent-Length: 0\r\n\r\n" + SECOND,
    "a NUL in the target": b"GET /\0 HTTP/1.1\r\n\r\n" + SECOND,
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
}


@pytest.mark.parametrize("sent", AMBIGUOUS.values(), ids=AMBIGUOUS.keys())
async def test_what_two_readers_could_read_in_two_ways_is_refused(
    serve: Serve, dial: Dial, sent: bytes
) -> None:
    served: list[str] = []

    async def handler(exchange: Exchange) -> None:
        served.append(exchange.path)
        exchange.respond(200)

    server = await serve(handler, **LIMITS)
    wire = await dial(server)
    wire.send(sent)
    status, headers, body = await wire.answer()
    assert (status, headers["connection"]) == (400, "close")
    assert b'"error"' in body
    assert await wire.at_end()
    assert served == []


@pytest.mark.parametrize(
    "sent",
    [
        framed(b"Content-Length: 35", body=SECOND),
        framed(b"Content-Length:   35  ", body=SECOND),
        framed(b"Transfer-Encoding: chunked", body=b"23\r\n" + SECOND + b"\r\n0\r\n\r\n"),
        framed(b"Transfer-Encoding: CHUNKED", body=b"23\r\n" + SECOND + b"\r\n0\r\n\r\n"),
        framed(b"Transfer-Encoding: chunked", body=b"023;a=b\r\n" + SECOND + b"\r\n0\r\n\r\n"),
        framed(b"Transfer-Encoding: chunked", body=b"23\r\n" + SECOND + b"\r\n0\r\nA: b\r\n\r\n"),
    ],
)
async def test_a_request_within_a_body_is_a_body(serve: Serve, dial: Dial, sent: bytes) -> None:
    served: list[tuple[str, bytes]] = []

    async def handler(exchange: Exchange) -> None:
        served.append((exchange.path, exchange.body))
        exchange.respond(200)

    server = await serve(handler, **LIMITS)
    wire = await dial(server)
    wire.send(sent + GET)
    assert (await wire.answer())[0] == 200
    assert (await wire.answer())[0] == 200
    assert served == [("/", SECOND), ("/x", b"")]


@pytest.mark.parametrize(
    "host",
    [b"h", b"", b"h:80", b"[::1]:8000", b"127.0.0.1", b"a_b.example", b"xn--bcher-kva.example"],
)
async def test_a_host_may_be_any_name_or_address(serve: Serve, dial: Dial, host: bytes) -> None:
    server = await serve(hello)
    wire = await dial(server)
    wire.send(b"GET / HTTP/1.1\r\nHost: %b \r\n\r\n" % host)
    assert (await wire.answer())[0] == 200


@pytest.mark.parametrize("pieces", [1, 20])
async def test_a_url_beyond_8_kib_is_a_414(serve: Serve, dial: Dial, pieces: int) -> None:
    server = await serve(hello)
    wire = await dial(server)
    wire.send(b"GET /" + b"a" * 8191 + b" HTTP/1.1\r\nHost: h\r\n\r\n")
    assert (await wire.answer())[0] == 200
    wire.send(b"GET /a?")
    for _ in range(pieces):
        wire.send(b"a" * (100_000 // pieces))
        await asyncio.sleep(0)
    status, headers, body = await wire.answer()
    assert (status, headers["connection"]) == (414, "close")
    assert b'"error"' in body


async def test_garbage_behind_a_request_does_not_touch_its_answer(serve: Serve, dial: Dial) -> None:
    server = await serve(hello)
    wire = await dial(server)
    wire.send(GET + b"\x00\x01garbage\r\n\r\n")
    status, headers, body = await wire.answer()
    assert (status, body) == (200, b'"hello"')
    assert await wire.at_end() or headers.get("connection") == "close"


@pytest.mark.parametrize(
    "endless",
    [b"A: " + b"x" * 4000, b"A: b\r\n" * 600, b";" + b"x" * 4000],
    ids=["a trailer", "trailers", "a chunk's extension"],
)
async def test_what_follows_a_body_is_bounded_too(serve: Serve, dial: Dial, endless: bytes) -> None:
    server = await serve(hello, **LIMITS)
    wire = await dial(server)
    size = b"0" if endless.startswith(b";") else b"0\r\n"
    wire.send(framed(b"Transfer-Encoding: chunked", body=b"1\r\na\r\n" + size))
    for _ in range(20):
        wire.send(endless)
        await taken()
    status, headers, _ = await wire.answer()
    assert (status, headers["connection"]) == (431, "close")


@pytest.mark.parametrize(
    ("first", "drop"),
    [
        (b"GET / HTTP/1.1\r\nHost: h\r\n", b"A: b\r\n"),
        (b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 900\r\n\r\n", b"x"),
        (framed(b"Transfer-Encoding: chunked"), b"1\r\nx\r\n"),
    ],
    ids=["head", "body", "chunks"],
)
async def test_a_request_that_drips_has_no_longer_than_one_that_stops(
    serve: Serve, dial: Dial, first: bytes, drop: bytes
) -> None:
    server = await serve(
        hello, head_timeout_s=0.15, body_timeout_s=0.15, body_bytes=10**6, headers=10**6
    )
    wire = await dial(server)
    wire.send(first)
    answer = asyncio.create_task(wire.answer())
    await until(answer.done, meanwhile=lambda: wire.send(drop), look_s=0.01)
    assert (await answer)[0] == 408


HALF = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 900000\r\n\r\n"


async def half_in(server: HttpServer, size_bytes: int) -> None:
    async with asyncio.timeout(10):
        while server.incoming_bytes != size_bytes:
            await asyncio.sleep(0)


async def test_bodies_that_are_half_in_take_bounded_memory(serve: Serve, dial: Dial) -> None:
    server = await serve(hello, body_memory_bytes=500_000)
    first, second, third = await dial(server), await dial(server), await dial(server)
    first.send(HALF + b"x" * 400_000)
    await half_in(server, 400_000)
    second.send(HALF + b"x" * 200_000)
    status, headers, body = await second.answer()
    assert (status, headers["connection"], headers["retry-after"]) == (503, "close", "1")
    assert b'"error"' in body
    assert await second.at_end()
    await half_in(server, 400_000)
    third.send(post(b"x" * 10_000))  # comes in one read
    assert (await third.answer())[0] == 200
    first.close()
    await half_in(server, 0)
    third.send(post(b"x" * 450_000))
    assert (await third.answer())[0] == 200
    assert server.incoming_bytes == 0


@pytest.mark.parametrize(
    ("then", "status"),
    [(b"x" * 600_000, 200), (b"", 408)],
    ids=["it is whole", "it is late"],
)
async def test_a_body_counts_until_it_is_whole_or_late(
    serve: Serve, dial: Dial, then: bytes, status: int
) -> None:
    server = await serve(hello, body_timeout_s=60 if then else 0.05)
    wire = await dial(server)
    wire.send(HALF + b"x" * 300_000)
    if then:
        await half_in(server, 300_000)
    wire.send(then)
    assert (await wire.answer())[0] == status
    assert server.incoming_bytes == 0


async def test_a_body_in_chunks_of_a_byte_takes_no_more_than_its_bytes(
    serve: Serve, dial: Dial
) -> None:
    bodies: list[bytes] = []

    async def handler(exchange: Exchange) -> None:
        bodies.append(exchange.body)
        exchange.respond(200)

    server = await serve(handler)
    wire = await dial(server)
    sent = framed(b"Transfer-Encoding: chunked") + b"2\r\nab\r\n" * 100_000
    tracemalloc.start()
    try:
        wire.send(sent)
        await half_in(server, 200_000)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < len(sent) + 400_000  # what the client has not sent yet is in here too
    wire.send(b"0\r\n\r\n")
    assert (await wire.answer())[0] == 200
    assert bodies == [b"ab" * 100_000]


async def test_those_who_drip_keep_nobody_else_waiting(serve: Serve, dial: Dial) -> None:
    server = await serve(hello, head_timeout_s=5)
    for _ in range(100):
        (await dial(server)).send(b"GET / HTTP/1.1\r\nHost: h\r\nA")
    wire = await dial(server)
    wire.send(GET)
    assert (await wire.answer())[0] == 200


async def test_requests_are_not_read_ahead_without_bound(serve: Serve, dial: Dial) -> None:
    go = asyncio.Event()

    async def handler(exchange: Exchange) -> None:
        await go.wait()
        exchange.respond(200, exchange.path.encode())

    server = await serve(handler, pipelined_bytes=64 * 1024)
    wire = await dial(server)
    await _flood(wire, 6_000)  # 18 MB, which the server reads and drops, for it must see the end
    go.set()
    answered, last = 0, ""
    while last != "close":
        _, headers, path = await wire.answer()
        assert path == b"/%d" % answered
        answered, last = answered + 1, headers.get("connection", "")
    assert answered < 500_000 / 3_000  # what one read and the bound may hold
    assert await wire.at_end()


async def test_requests_of_a_few_bytes_are_not_read_ahead_without_bound(
    serve: Serve, dial: Dial
) -> None:
    go = asyncio.Event()

    async def handler(exchange: Exchange) -> None:
        await go.wait()
        exchange.respond(200, exchange.path.encode())

    server = await serve(handler, pipelined=8)
    wire = await dial(server)
    wire.send(b"".join(b"GET /%d HTTP/1.1\r\nHost: h\r\n\r\n" % i for i in range(100)))
    go.set()
    for number in range(9):
        _, headers, path = await wire.answer()
        assert path == b"/%d" % number
        assert headers.get("connection", "") == ("close" if number == 8 else "")
    assert await wire.at_end()


async def _flood(wire: Wire, count: int) -> None:
    padding = b"X: " + b"x" * 3000
    for number in range(count):
        wire.send(b"GET /%d HTTP/1.1\r\nHost: h\r\n%b\r\n\r\n" % (number, padding))
        await wire.writer.drain()


@pytest.mark.parametrize("value", [b"\xff\xfe", b"\xc3\x28", "é".encode(), b"\x80" * 50])
async def test_bytes_that_are_no_utf_8_are_passed_or_refused_but_break_nothing(
    serve: Serve, dial: Dial, value: bytes
) -> None:
    seen: list[Exchange] = []

    async def handler(exchange: Exchange) -> None:
        seen.append(exchange)
        exchange.respond(200)

    server = await serve(handler)
    wire = await dial(server)
    wire.send(
        b"POST /%b?%b HTTP/1.1\r\nHost: h\r\nA: %b\r\nContent-Length: 2\r\n\r\n{}" % ((value,) * 3)
    )
    status, _, _ = await wire.answer()
    assert status in (200, 400)
    if status == 200:
        assert seen[0].headers["a"].encode("latin-1") == value


@pytest.mark.parametrize("cuts", range(3))
async def test_a_request_may_come_in_any_pieces(serve: Serve, dial: Dial, cuts: int) -> None:
    sent = post(b'{"a": "b"}', b"X-A: b\r\n") + framed(
        b"Transfer-Encoding: chunked", body=b"3;x=y\r\nabc\r\n0\r\nT: u\r\n\r\n"
    )

    async def handler(exchange: Exchange) -> None:
        exchange.respond(200, exchange.body)

    server = await serve(handler)
    for at in range(1 + cuts, len(sent), 3):
        wire = await dial(server)
        wire.send(sent[:at])
        await asyncio.sleep(0)
        wire.send(sent[at:])
        assert (await wire.answer())[2] == b'{"a": "b"}'
        assert (await wire.answer())[2] == b"abc"


async def test_no_bytes_whatsoever_make_the_server_fail(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    server = await serve(hello, head_timeout_s=0.05, body_timeout_s=0.05, idle_timeout_s=0.05)
    pieces = st.lists(
        st.sampled_from(
            [
                *(b"GET / HTTP/1.1\r\n", b"POST / HTTP/1.1\r\n", b"Host: h\r\n", b"\r\n", b"\n"),
                *(b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b"abc"),
                *(b"3\r\nabc\r\n", b"0\r\n\r\n", b"Expect: 100-continue\r\n", b"\0"),
            ]
        )
        | st.binary(max_size=12),
        max_size=12,
    )
    loop = asyncio.get_running_loop()

    async def send(data: bytes) -> None:
        wire = await Wire.dial(server.port)
        wire.send(data)
        wire.writer.write_eof()
        async with asyncio.timeout(10):
            said = await wire.reader.read()
        wire.close()
        assert said == b"" or said.startswith(b"HTTP/1.1 ")
        assert b" 500 " not in said

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(pieces)
    def sent(parts: list[bytes]) -> None:
        asyncio.run_coroutine_threadsafe(send(b"".join(parts)), loop).result(20)

    await asyncio.to_thread(sent)
    assert not caplog.records
