"""The pooled client of engines, against servers that answer byte by byte as a test says."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio
from tests.fakes.patience import every, taken, until_still

from kvrouter.http.client.pool import ConnectionPool, Deadlines, UpstreamError
from kvrouter.http.deadlines import DeadlineTimer
from kvrouter.http.failure import Failure
from kvrouter.http.headers import unchunk

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-A: b\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
SOON = Deadlines(connect_s=5, first_byte_s=0.05, idle_s=0.05)
LATER = Deadlines(connect_s=5, first_byte_s=20, idle_s=20)
Script = Callable[["Peer"], Awaitable[None]]


class Peer:
    """The server's side of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.gone = asyncio.Event()

    async def request(self) -> bytes:
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        return head + await self.reader.readexactly(length)

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def end(self) -> None:
        """Wait until the other side has left."""
        with contextlib.suppress(ConnectionError):
            await self.reader.read()
        self.gone.set()

    async def left(self) -> None:
        async with asyncio.timeout(10):
            await self.gone.wait()


class Sink:
    """Takes bodies; as a client of HTTP/1.1 it takes frames as they are."""

    def __init__(self, *, frames: bool = False) -> None:
        self.data = b""
        self.pieces: asyncio.Queue[bytes] = asyncio.Queue()
        self.paused = False
        self._frames = frames

    @property
    def passer(self) -> Callable[[bytes], None] | None:
        return self.write if self._frames else None

    def write(self, data: bytes) -> None:
        self.data += data
        self.pieces.put_nowait(data)


Start = Callable[..., Awaitable[tuple[ConnectionPool, list[Peer]]]]


@pytest_asyncio.fixture
async def timer() -> AsyncIterator[DeadlineTimer]:
    timer = DeadlineTimer(asyncio.get_running_loop(), 0.01)
    yield timer
    timer.close()


@pytest_asyncio.fixture
async def start(timer: DeadlineTimer) -> AsyncIterator[Start]:
    """Plays the given scripts, one per connection in turn; the last one again and again."""
    servers: list[asyncio.Server] = []
    pools: list[ConnectionPool] = []
    peers: list[Peer] = []

    async def begin(*scripts: Script) -> tuple[ConnectionPool, list[Peer]]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            peer = Peer(reader, writer)
            peers.append(peer)
            try:
                await scripts[min(len(peers), len(scripts)) - 1](peer)
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        servers.append(server)
        port = server.sockets[0].getsockname()[1]
        pool = ConnectionPool("127.0.0.1", port, timer)
        pools.append(pool)
        return pool, peers

    yield begin
    for pool in pools:
        pool.close()
    for server in servers:
        server.close()
    for peer in peers:
        peer.writer.transport.abort()


async def answers_ok(peer: Peer) -> None:
    while True:
        await peer.request()
        await peer.say(OK)


async def hangs(peer: Peer) -> None:
    await peer.request()
    await peer.end()


async def leaves(peer: Peer) -> None:
    await peer.request()


def saying(*pieces: bytes) -> Script:
    async def script(peer: Peer) -> None:
        await peer.request()
        for piece in pieces:
            await peer.say(piece)
            await taken()
        await peer.end()

    return script


async def test_a_connection_is_used_again(start: Start) -> None:
    pool, peers = await start(answers_ok)
    for _ in range(3):
        answer = await pool.send("POST", "/p", body=(b"{", b"}"), deadlines=LATER)
        assert await answer.read(100, 5) == b"ok"
        assert (answer.status, answer.header(b"x-a")) == (200, "b")
    assert len(peers) == 1
    assert pool.idle == 1


async def test_concurrent_requests_have_a_connection_each(start: Start) -> None:
    pool, peers = await start(answers_ok)
    sends = (pool.send("POST", "/", body=(b"",), deadlines=LATER) for _ in range(5))
    for answer in await asyncio.gather(*sends):
        assert await answer.read(100, 5) == b"ok"
    assert len(peers) == pool.idle == 5


async def test_a_connection_that_had_gone_stale_is_replaced_once(start: Start) -> None:
    async def once(peer: Peer) -> None:
        await peer.request()
        await peer.say(OK)
        await peer.request()  # and closes without a byte

    pool, peers = await start(once, answers_ok)
    for _ in range(2):
        answer = await pool.send("POST", "/", body=(b"",), deadlines=LATER)
        assert await answer.read(100, 5) == b"ok"
    assert len(peers) == 2


async def test_what_may_not_be_sent_again_never_takes_a_kept_connection(start: Start) -> None:
    again: list[bytes] = []

    async def once(peer: Peer) -> None:
        await peer.request()
        await peer.say(OK)
        again.append(await peer.request())  # and closes without a byte

    pool, peers = await start(once, answers_ok)
    for _ in range(2):
        answer = await pool.send("POST", "/", body=(b"",), deadlines=LATER, once=True)
        assert await answer.read(100, 5) == b"ok"
    assert (len(peers), again) == (2, [])


async def test_a_new_connection_that_breaks_is_not_tried_again(start: Start) -> None:
    pool, peers = await start(leaves)
    with pytest.raises(UpstreamError) as caught:
        await pool.send("POST", "/", body=(b"",), deadlines=LATER)
    assert caught.value.failure is Failure.BROKEN
    assert len(peers) == 1


async def test_requests_that_run_or_connect_when_connections_are_cut_fail(start: Start) -> None:
    pool, peers = await start(hangs)
    asked = [pool.send("POST", "/", body=(b"",), deadlines=LATER) for _ in range(2)]
    first = asyncio.create_task(asked[0])
    while not peers:
        await asyncio.sleep(0)
    second = asyncio.create_task(asked[1])
    await asyncio.sleep(0)  # it connects
    pool.cut(Failure.DEAD, "the engine was removed")
    for task, failure in ((first, Failure.DEAD), (second, Failure.REFUSED)):
        with pytest.raises(UpstreamError, match="removed") as caught:
            await task
        assert caught.value.failure is failure
        assert not caught.value.stale
    with pytest.raises(UpstreamError, match="removed"):
        await pool.send("POST", "/", body=(b"",), deadlines=LATER)


async def test_a_port_without_a_listener_is_told_apart(timer: DeadlineTimer) -> None:
    with pytest.raises(UpstreamError) as caught:
        await ConnectionPool("127.0.0.1", 1, timer).send("GET", "/", deadlines=LATER)
    assert caught.value.failure is Failure.REFUSED


async def test_an_answer_that_does_not_begin_times_out_and_the_engine_sees_it(
    start: Start,
) -> None:
    pool, peers = await start(hangs)
    with pytest.raises(UpstreamError) as caught:
        await pool.send("POST", "/", body=(b"",), deadlines=SOON)
    assert caught.value.failure is Failure.TIMEOUT
    await peers[0].left()


@pytest.mark.parametrize(
    "pieces",
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab",),
        (CHUNKED + b"2\r\nab\r\n",),
        (b"HTTP/1.1 200 OK\r\n\r\nab",),
    ],
)
async def test_a_body_that_stops_times_out(start: Start, pieces: tuple[bytes, ...]) -> None:
    pool, peers = await start(saying(*pieces))
    answer = await pool.send("POST", "/", body=(b"",), deadlines=LATER)
    with pytest.raises(UpstreamError) as caught:
        await answer.read(100, 0.05)
    assert caught.value.failure is Failure.TIMEOUT
    await peers[0].left()


@pytest.mark.parametrize(
    "pieces",
    [
        (OK,),
        (OK[:9], OK[9:30], OK[30:]),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK,),
        (CHUNKED + b"1\r\no\r\n1\r\nk\r\n0\r\n\r\n",),
        (CHUNKED + b"1\r\no", b"\r\n1\r\nk\r\n0\r\n", b"\r\n"),
        (CHUNKED[:20], CHUNKED[20:] + b"2\r\nok\r\n0\r\n\r\n"),
    ],
)
async def test_an_answer_may_come_in_any_pieces(start: Start, pieces: tuple[bytes, ...]) -> None:
    pool, _ = await start(saying(*pieces))
    answer = await pool.send("POST", "/", body=(b"",), deadlines=LATER)
    assert await answer.read(100, 5) == b"ok"
    assert pool.idle == 1


async def test_a_body_without_a_length_ends_with_its_connection(start: Start) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(b"HTTP/1.1 200 OK\r\nServer: x\r\n\r\no")
        await peer.say(b"k")

    pool, _ = await start(script)
    answer = await pool.send("POST", "/", body=(b"",), deadlines=LATER)
    assert await answer.read(100, 5) == b"ok"
    assert pool.idle == 0


@pytest.mark.parametrize("said", [b"SSH-2.0\r\n\r\n", b"HTTP/1.1 2x0 OK\r\n\r\n"])
async def test_what_is_not_http_is_the_engines_fault(start: Start, said: bytes) -> None:
    pool, _ = await start(saying(said))
    with pytest.raises(UpstreamError) as caught:
        await pool.send("POST", "/", body=(b"",), deadlines=LATER)
    assert caught.value.failure is Failure.ANSWER


@pytest.mark.parametrize("said", [b"zz\r\n", b"2\r\nabc\r\n"])
async def test_what_is_not_chunked_is_the_engines_fault(start: Start, said: bytes) -> None:
    pool, _ = await start(saying(CHUNKED + b"1\r\nx\r\n", said))
    answer = await pool.send("POST", "/", body=(b"",), deadlines=LATER)
    with pytest.raises(UpstreamError) as caught:
        await answer.read(100, 5)
    assert caught.value.failure is Failure.ANSWER


async def test_an_answer_beyond_its_limit_is_given_up(start: Start) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 999999\r\n\r\n"
    pool, peers = await start(saying(head, b"x" * 500, b"x" * 600))
    answer = await pool.send("POST", "/", body=(b"",), deadlines=LATER)
    with pytest.raises(UpstreamError, match="exceeds 1000 bytes") as caught:
        await answer.read(1000, 5)
    assert caught.value.failure is Failure.TOO_LARGE  # which is no fault of the engine
    await peers[0].left()


async def test_cancelling_a_send_closes_its_connection(start: Start) -> None:
    pool, peers = await start(hangs)
    task = asyncio.create_task(pool.send("POST", "/", body=(b"",), deadlines=LATER))
    while not peers:
        await asyncio.sleep(0)
    task.cancel()
    await peers[0].left()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("frames", [False, True])
async def test_a_relay_passes_pieces_on_as_they_come(start: Start, frames: bool) -> None:
    go = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(CHUNKED + b"2\r\nab\r\n")
        await go.wait()
        await peer.say(b"1\r\nc")
        await peer.say(b"\r\n0\r\n\r\n")
        await peer.end()

    pool, _ = await start(script)
    answer = await pool.send("POST", "/", body=(b"",), deadlines=LATER)
    sink = Sink(frames=frames)
    task = asyncio.create_task(answer.relay_to(sink, 5))
    async with asyncio.timeout(5):
        await sink.pieces.get()
        go.set()
        await task
    assert sink.data == (b"2\r\nab\r\n1\r\nc\r\n" if frames else b"abc")
    assert pool.idle == 1


EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def chunks(*pieces: bytes) -> list[bytes]:
    return [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces]


@pytest.mark.parametrize("frames", [False, True])
async def test_comments_go_on_before_a_stream_begins(start: Start, frames: bool) -> None:
    go, passed = asyncio.Event(), asyncio.Queue[bytes]()
    pieces = [b": a\n", b"\n: b\r\n\r\n", b": c", b"\n\ndata: a\n\n"]

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(CHUNKED if frames else EVENTS)
        sent = chunks(*pieces) if frames else pieces
        for piece in sent[:2]:
            await peer.say(piece)
        await go.wait()
        for piece in sent[2:]:
            await peer.say(piece)
        if frames:
            await peer.say(b"0\r\n\r\n")
        peer.writer.close()

    pool, _ = await start(script)
    answer = await pool.send("POST", "/", body=(b"",), deadlines=LATER)
    task = asyncio.create_task(answer.first_event(5, passed.put_nowait))
    assert await passed.get() == b": a\n\n: b\r\n\r\n"
    assert not answer.begun
    assert not task.done()
    go.set()
    await task
    assert answer.begun
    sink = Sink(frames=frames)
    await answer.relay_to(sink, 5)
    assert (unchunk(sink.data) if frames else sink.data) == b": c\n\ndata: a\n\n"
    assert answer.feed is not None
    assert answer.feed.events == 1


@pytest.mark.parametrize("head", [CHUNKED, EVENTS])
async def test_a_comment_without_an_end_is_no_answer(start: Start, head: bytes) -> None:
    pieces = [b":" + b"x" * 65535] * 20
    pool, _ = await start(saying(head, *(chunks(*pieces) if head is CHUNKED else pieces)))
    answer = await pool.send("POST", "/", body=(b"",), deadlines=LATER)
    with pytest.raises(UpstreamError, match="too large"):
        await answer.first_event(5, Sink().write)


@pytest.mark.parametrize("head", [CHUNKED, EVENTS])
@pytest.mark.parametrize("begun", [False, True])
async def test_comments_do_not_put_a_deadline_off(start: Start, head: bytes, begun: bool) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        event, comment = b"data: a\n\n", b": a\n\n"
        if head is CHUNKED:
            event, comment = chunks(event)[0], chunks(comment)[0]
        await peer.say(head)
        if begun:
            await peer.say(event)
        await every(0.01, lambda: peer.say(comment))

    pool, _ = await start(script)
    answer = await pool.send("POST", "/", body=(b"",), deadlines=LATER)
    if begun:
        await answer.first_event(5, Sink().write)
    rest = answer.relay_to(Sink(), 0.1) if begun else answer.first_event(0.1, Sink().write)
    with pytest.raises(UpstreamError, match=r"within 0\.1 s"):
        await rest


@pytest.mark.parametrize("head", [CHUNKED, EVENTS])
async def test_any_bytes_of_a_body_that_is_no_stream_put_its_deadline_off(
    start: Start, head: bytes
) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(head)
        for piece in chunks(*[b"x"] * 30) if head is CHUNKED else [b"x"] * 30:
            await peer.say(piece)
            await asyncio.sleep(0.01)
        if head is CHUNKED:
            await peer.say(b"0\r\n\r\n")
        peer.writer.close()

    pool, _ = await start(script)
    answer = await pool.send("POST", "/", body=(b"",), deadlines=LATER)
    sink = Sink()
    await answer.relay_to(sink, 0.15)
    assert sink.data == b"x" * 30


@pytest.mark.parametrize("frames", [False, True])
@pytest.mark.parametrize(
    ("chunk", "body"),
    [
        (b"3;a=b\r\nabc\r\n", b"abc"),
        (b"1000000\r\n" + b"x" * 0x1000000 + b"\r\n", b"x" * 0x1000000),
    ],
    ids=["extension", "16 MiB"],
)
async def test_a_chunk_may_have_an_extension_or_be_large(
    start: Start, chunk: bytes, body: bytes, frames: bool
) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(CHUNKED + chunk + b"0\r\n\r\n")
        await peer.end()

    pool, _ = await start(script)
    answer = await pool.send("POST", "/", body=(b"",), deadlines=LATER)
    sink = Sink(frames=frames)
    await answer.relay_to(sink, 5)
    assert (unchunk(sink.data) if frames else sink.data) == body
    assert pool.idle == 1


async def test_half_a_frame_is_not_passed_on_when_the_engine_dies(start: Start) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(CHUNKED + b"2\r\nab\r\n9\r\nhalf")

    pool, _ = await start(script)
    answer = await pool.send("POST", "/", body=(b"",), deadlines=LATER)
    sink = Sink(frames=True)
    with pytest.raises(UpstreamError) as caught:
        await answer.relay_to(sink, 5)
    assert caught.value.failure is Failure.BROKEN
    assert sink.data == b"2\r\nab\r\n"


async def test_an_engine_is_not_read_while_the_sink_is_paused_nor_does_time_run(
    start: Start,
    timer: DeadlineTimer,
) -> None:
    sent = 0

    async def floods(peer: Peer) -> None:
        nonlocal sent
        await peer.request()
        await peer.say(CHUNKED)
        for _ in range(512):
            await peer.say(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            sent += 65536
        await peer.say(b"0\r\n\r\n")
        await peer.end()

    pool, _ = await start(floods)
    answer = await pool.send("POST", "/", body=(b"",), deadlines=LATER)
    sink = Sink()
    sink.paused = True
    task = asyncio.create_task(answer.relay_to(sink, 20))
    await until_still(lambda: sent)
    assert sent < 512 * 65536
    timer.sweep(asyncio.get_running_loop().time() + 1000)
    await asyncio.sleep(0)
    assert not task.done()
    answer.resume()
    async with asyncio.timeout(20):
        await task
    assert len(sink.data) == 512 * 65536


async def test_a_stream_that_is_never_asked_for_is_not_read_without_bound(start: Start) -> None:
    sent = 0

    async def floods(peer: Peer) -> None:
        nonlocal sent
        await peer.request()
        await peer.say(CHUNKED)
        while True:
            await peer.say(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            sent += 65536

    pool, _ = await start(floods)
    answer = await pool.send("POST", "/", body=(b"",), deadlines=LATER)
    await until_still(lambda: sent)
    assert sent < 64 << 20
    answer.close()


async def test_an_idle_connection_on_which_a_byte_comes_is_dropped(start: Start) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(OK + b"more")
        await peer.end()

    pool, peers = await start(script, answers_ok)
    answer = await pool.send("POST", "/", body=(b"",), deadlines=LATER)
    assert await answer.read(100, 5) == b"ok"
    await peers[0].left()
    answer = await pool.send("POST", "/", body=(b"",), deadlines=LATER)
    assert await answer.read(100, 5) == b"ok"
