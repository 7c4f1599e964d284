"""Whatever a connection went through, its objects are gone when it is, without the collector.

Bodies, transports and their buffers hang on them. The collector of a router runs seldom.
"""

import asyncio
import contextlib
import gc
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from tests.fakes.certificates import Authority
from tests.fakes.patience import taken
from tests.unit.router.http.conftest import GET, Wire, post

from kvrouter.credentials.tls import client_context, server_context
from kvrouter.http.client.pool import ConnectionPool, Deadlines, UpstreamError
from kvrouter.http.deadlines import DeadlineTimer
from kvrouter.http.server.exchange import Exchange
from kvrouter.http.server.limits import Limits
from kvrouter.http.server.listener import HttpServer

pytestmark = pytest.mark.slow
OF_A_CONNECTION = frozenset(
    {
        *("Connection", "Reader", "Exchange", "HttpRequestParser", "HeaderFields"),
        *("ClientConnection", "EngineResponse", "HttpResponseParser", "StreamFeed"),
    }
)
LATER = Deadlines(connect_s=20, first_byte_s=20, idle_s=20)
HALF = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 900000\r\n\r\n" + b"x" * 300_000
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def uncollected() -> Iterator[None]:
    """The collector does not run, and what was there before does not count."""
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


def living() -> Counter[str]:
    """How many objects of connections there are."""
    names = (type(each).__name__ for each in gc.get_objects())
    return Counter(name for name in names if name in OF_A_CONNECTION)


async def gone() -> None:
    """Return when there are none left; those that the collector must find stay."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(5):
            while living():
                await asyncio.sleep(0)
    assert living() == Counter()


@dataclass
class Place:
    """Where connections are made: plain or with TLS."""

    tls: bool
    authority: Authority
    watch: DeadlineTimer

    async def serve(self, handler: Callable[[Exchange], Awaitable[None]]) -> HttpServer:
        limits = Limits(tick_s=0.01, body_timeout_s=0.2, body_bytes=800_000)
        server = HttpServer(handler, limits)
        context = server_context(*self.authority.sign(), "") if self.tls else None
        await server.listen("127.0.0.1", 0, tls=context)
        return server

    async def dial(self, port: int) -> Wire:
        context = client_context(self.authority.ca_file) if self.tls else None
        return Wire(*await asyncio.open_connection("127.0.0.1", port, ssl=context))

    def pool(self, port: int) -> ConnectionPool:
        context = client_context(self.authority.ca_file) if self.tls else None
        return ConnectionPool("127.0.0.1", port, self.watch, tls=lambda: context)


@pytest_asyncio.fixture(params=[False, True], ids=["plain", "tls"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    watch = DeadlineTimer(asyncio.get_running_loop(), 0.01)
    yield Place(request.param, Authority(tmp_path), watch)
    watch.close()


async def handler(exchange: Exchange) -> None:
    if exchange.path == "/fails":
        raise LookupError("on purpose")
    if exchange.path == "/streams":
        exchange.start(200)
        exchange.write(b"abc")
        await asyncio.sleep(0)
        exchange.end()
    elif exchange.path == "/hangs":
        await asyncio.Event().wait()
    else:
        exchange.respond(200, exchange.body)


def asking(path: bytes, more: bytes = b"") -> bytes:
    return b"GET %b HTTP/1.1\r\nHost: h\r\n%b\r\n" % (path, more)


UPGRADE = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"


@pytest.mark.parametrize(
    ("sent", "answers"),
    [
        (b"", 0),
        (GET, 1),
        (post(b"{}") * 3, 3),
        (asking(b"/streams"), 1),
        (asking(b"/fails"), 1),
        (asking(b"/hangs"), 0),
        (asking(b"/hangs") + GET * 100, 0),
        (GET + HALF[:400_000], 1),
        (HALF, 0),
        (HALF.replace(b"900000", b"700000"), 1),
        (HALF * 4, 1),
        (b"nonsense\r\n\r\n", 1),
        (post(b"{}", UPGRADE) + post(b"{}", UPGRADE)[:-1], 1),
    ],
    ids=[
        *("nothing", "a request", "3 requests", "a stream", "a failure", "a hung handler"),
        *("pipelined", "half a head", "too large", "half a body", "more", "nonsense", "upgrade"),
    ],
)
@pytest.mark.usefixtures("uncollected")
async def test_a_closed_connection_of_a_client_leaves_nothing(
    place: Place, caplog: pytest.LogCaptureFixture, sent: bytes, answers: int
) -> None:
    caplog.set_level(logging.CRITICAL, "kvrouter.http")  # a record would hold the traceback
    server = await place.serve(handler)
    wire = await place.dial(server.port)
    wire.send(sent)
    with contextlib.suppress(ConnectionError):
        await wire.writer.drain()
    for _ in range(answers):
        await wire.head()
    wire.close()
    async with asyncio.timeout(10):
        await server.emptied()
    assert server.incoming_bytes == 0
    await server.close()
    await gone()


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
PIECE = b"3\r\nabc\r\n"


class Sink:
    """Takes a body."""

    paused = False
    passer = None

    def write(self, data: bytes) -> None:
        del data


@pytest.mark.parametrize("how", ["read", "relay", "first_event", "close"])
@pytest.mark.parametrize(
    "said",
    [
        [OK],
        [b"HTTP/1.1 200 OK\r\n\r\n", b"ok", b""],
        [CHUNKED + PIECE + b"0\r\n\r\n"],
        [CHUNKED, PIECE, b"0\r\n\r\n"],
        [CHUNKED + PIECE, PIECE, b""],
        [CHUNKED + PIECE, b"zz\r\n"],
        [CHUNKED, b""],
        [CHUNKED],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", b""],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc"],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\n" + b"x" * 8000],
        [b"nonsense\r\n\r\n"],
        [b""],
        [],
    ],
)
@pytest.mark.usefixtures("uncollected")
async def test_a_closed_connection_to_an_engine_leaves_nothing(
    place: Place, said: list[bytes], how: str
) -> None:
    """`said`: pieces of the answer; an empty one closes, without one the engine hangs."""

    async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended.append(done := asyncio.Event())
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            for piece in said:
                if piece:
                    writer.write(piece)
                    await writer.drain()
                    await taken()
                else:
                    writer.transport.abort()
            await reader.read()
        writer.transport.abort()
        done.set()

    ended: list[asyncio.Event] = []
    context = server_context(*place.authority.sign(), "") if place.tls else None
    server = await asyncio.start_server(engine, "127.0.0.1", 0, ssl=context)
    pool = place.pool(server.sockets[0].getsockname()[1])
    soon = Deadlines(connect_s=20, first_byte_s=0.1, idle_s=0.1)
    with contextlib.suppress(UpstreamError):
        answer = await pool.send("POST", "/", body=(b"{}",), deadlines=soon)
        if how == "read":
            await answer.read(5000, 0.1)
        elif how == "relay":
            await answer.relay_to(Sink(), 0.1)
        elif how == "first_event":
            await answer.first_event(0.1, Sink().write)
            answer.close()
        else:
            answer.close()
    answer = None  # type: ignore[assignment]
    pool.close()
    await gone()
    for done in ended:
        await done.wait()
    server.close()
    await server.wait_closed()


@pytest.mark.usefixtures("uncollected")
async def test_a_cancelled_call_to_an_engine_leaves_nothing(place: Place) -> None:
    began = asyncio.Event()

    async def hangs(exchange: Exchange) -> None:
        began.set()
        await handler(exchange)

    server = await place.serve(hangs)
    pool = place.pool(server.port)
    call = asyncio.create_task(pool.send("GET", "/hangs", deadlines=LATER))
    await began.wait()
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call
    del call
    pool.close()
    await server.close()
    await gone()
