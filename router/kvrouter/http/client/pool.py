"""All connections to one engine, kept between requests: each takes one request at a time.

Retries only after a connection that had gone stale.
"""

import asyncio
import ssl
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import cast

import httptools

from kvrouter._native import StreamFeed
from kvrouter.http.client.response import EngineResponse, UpstreamError
from kvrouter.http.deadlines import NEVER, DeadlineTimer
from kvrouter.http.failure import Failure
from kvrouter_store.connection.keep_alive import keep_alive
from kvrouter_store.system_errors import is_ours

__all__ = ["ConnectionPool", "Deadlines", "EngineResponse", "UpstreamError"]

_KEEP_S = 4.0  # uvicorn, which vLLM's server is, closes an idle connection after 5 s
_MAX_IDLE = 1024
_HEAD_BYTES = 32 * 1024
_CHUNKED = (b"transfer-encoding", b"chunked")
_BODILESS = frozenset({204, 304})


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds that an engine may take, per request."""

    connect_s: float = 5.0
    first_byte_s: float = 600.0
    idle_s: float = 120.0


@dataclass(eq=False, repr=False, slots=True)
class ClientConnection(asyncio.Protocol):
    """The router's side of one TCP connection to an engine.

    Owned by a `ConnectionPool` while idle, else by the `EngineResponse` that it reads.
    """

    loop: asyncio.AbstractEventLoop
    on_free: Callable[["ClientConnection"], None]  # called when it can take another request
    on_gone: Callable[["ClientConnection"], None]  # called once, when it is closed
    transport: asyncio.Transport = field(init=False)
    expires_at: float = NEVER
    heard_s: float = 0.0  # when a byte last came that no feed took
    # Takes the chunk frames of a stream as they came, past the answer.
    passer: Callable[[bytes], None] | None = None
    _parser: httptools.HttpResponseParser | None = None  # while an answer may come
    _answer: EngineResponse | None = None
    _reused: bool = False
    _bytes_seen: bool = False
    _head_done: bool = False
    _until_eof: bool = False
    _keep: bool = False
    _each: bool = False
    _feed: StreamFeed | None = None
    _expect_s: float = NEVER

    def send(self, request: Sequence[bytes], first_byte_s: float) -> EngineResponse:
        """Send a whole request; its answer's head must come within `first_byte_s` seconds."""
        answer = self._answer = EngineResponse(self, self.loop)
        self._bytes_seen = False
        self._head_done = False
        self._until_eof = False
        self._feed = self.passer = None
        if self._parser is None:
            self._parser = httptools.HttpResponseParser(self)
        self.expect(first_byte_s, each=False)
        self.transport.writelines(request)
        return answer

    def expect(self, deadline_s: float, *, each: bool) -> None:
        """Allow `deadline_s` from now, or (`each`) from every piece of the answer to the next."""
        self._expect_s = deadline_s
        self._each = each
        self.expires_at = self.loop.time() + deadline_s

    def keep(self, keep_s: float) -> None:
        """Stay open while idle, for at most `keep_s` seconds."""
        self._each = False
        self._reused = True
        self.expires_at = self.loop.time() + keep_s

    def usable(self) -> bool:
        """Whether a request may be sent."""
        return self._answer is None and not self.transport.is_closing()

    def pause(self) -> None:
        """Stop reading; deadlines stop too, because it is not the engine that is slow."""
        self.expires_at = NEVER
        if not self.transport.is_closing():
            self.transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        self.expires_at = self.loop.time() + self._expect_s
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def abort(self) -> None:
        """Close now; the engine sees its client leave."""
        self._answer = self._feed = self.passer = None
        self.expires_at = NEVER
        self.transport.abort()

    def cut(self, failure: Failure, message: str) -> None:
        """Close now; an answer that is being read fails like that."""
        self._fail(failure, message)

    def signs(self) -> tuple[float, float | None, int]:
        """When its engine last sent a byte; what the stream that is relayed owes, and its events.

        It owes an event since its last one, or since it is read on: never in a pause. None: there
        is no such stream.
        """
        answer, feed = self._answer, self._answer.feed if self._answer is not None else None
        if answer is None or feed is None:
            return self.heard_s, None, 0
        heard_s, since_s = max(self.heard_s, feed.last_s), self.expires_at - self._expect_s
        owes = self._each and answer.streams
        return heard_s, max(feed.last_data_s, since_s) if owes else None, feed.events

    # -- HasDeadline

    def expire(self) -> None:
        """The answer is late, or the connection was idle for long enough."""
        answer = self._answer
        if self._each and answer is not None and answer.feed is not None:
            # Pieces of a stream do not move the deadline, and comments keep nothing alive.
            last_s = answer.feed.last_data_s if answer.streams else answer.feed.last_s
            self.expires_at = last_s + self._expect_s
            if self.expires_at > self.loop.time():
                return
        self._fail(Failure.TIMEOUT, f"no answer within {self._expect_s:g} s")

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ready for its first request."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        """Feed the parser; the answer's bytes go on from within."""
        if self._answer is None:
            self.abort()  # no request is open: RFC 9112 9.2 leaves nothing to do but close
        elif self._feed is not None:
            frames = self._feed.take(data)
            if frames is None:
                self._take_frames(self._feed)
            elif self.passer is not None:
                self.passer(frames)
            else:
                self._answer.data(frames)
        elif self._parser is not None:
            self._parse(data, self._parser)

    def _parse(self, data: bytes, parser: httptools.HttpResponseParser) -> None:
        self.heard_s = self.loop.time()
        if self._each and self._answer is not None and self._answer.feed is None:
            self.expires_at = self.heard_s + self._expect_s
        try:
            if not self._bytes_seen:
                self._bytes_seen = True
                end = data.find(b"\r\n\r\n", 0, _HEAD_BYTES) + 4
                if end > 4 and data.find(b"chunked", 0, end) >= 0:
                    data = self._take_stream_head(data, end, parser)
            if data:
                parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail(Failure.ANSWER, "the answer is not HTTP/1.1")

    def _take_stream_head(
        self, data: bytes, end: int, parser: httptools.HttpResponseParser
    ) -> bytes:
        """Parse the head of a stream, and hand its body to a feed; returns what is left to parse.

        `end`: of the head. If it does not come in one piece, the parser takes the chunks as well.
        """
        parser.feed_data(data[:end])
        answer = self._answer
        if answer is None or not self._head_done or _CHUNKED not in answer.headers:
            return data[end:]
        self._feed = answer.feed = StreamFeed()
        answer.framed = True
        self._parser = None  # it waits for a body; the next answer gets another one
        if end < len(data):
            self.data_received(data[end:])
        return b""

    def _take_frames(self, feed: StreamFeed) -> None:
        """Pass on the whole frames of a piece that is cut, marked, or the last one."""
        frames = feed.frames()
        if frames and self.passer is not None and not feed.marked:
            self.passer(frames)
        elif frames and self._answer is not None:
            self._answer.data(frames)
        if feed.ended:
            self._keep = self._keep and not feed.overrun
            self.on_message_complete()
        elif feed.bad:
            self._fail(Failure.ANSWER, "the answer is not chunked as HTTP/1.1 says")

    def connection_lost(self, exc: Exception | None) -> None:
        """An answer that is being read ends: well only if the connection's end is its end."""
        self.on_gone(self)
        self.expires_at = NEVER
        self._feed = self.passer = None
        self._parser = None  # it holds methods of this connection
        answer, self._answer = self._answer, None
        if answer is None:
            return
        if self._until_eof and exc is None:
            answer.completed()
            return
        stale = self._reused and not self._bytes_seen
        answer.failed(UpstreamError(Failure.BROKEN, "the connection broke", stale=stale))

    # -- callbacks of the parser

    def on_message_begin(self) -> None:
        """An answer begins. One that nobody asked for would be taken for the next request's."""
        if self._answer is None:
            self.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header; those after the body (trailers) are dropped."""
        if self._answer is not None and not self._head_done:
            self._answer.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head is whole, unless it was only an interim one (1xx)."""
        answer, parser = self._answer, self._parser
        if answer is None or parser is None:
            return
        status = parser.get_status_code()
        if status < 200:
            answer.headers.clear()
            return
        self._head_done = True
        self._keep = parser.should_keep_alive()
        if not self._keep and status not in _BODILESS:
            names = [name for name, _ in answer.headers]
            self._until_eof = not {b"content-length", b"transfer-encoding"}.intersection(names)
        answer.arrived(status)

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        if self._answer is not None:
            self._answer.data(data)

    def on_message_complete(self) -> None:
        """The answer is whole: the connection is free, if both sides keep it."""
        answer = self._answer
        if answer is None or not self._head_done:
            return
        self._answer = self._feed = self.passer = None
        self.expires_at = NEVER
        answer.completed()
        if self._keep and not self.transport.get_write_buffer_size():
            self.on_free(self)
        else:
            self.transport.close()

    def _fail(self, failure: Failure, message: str) -> None:
        answer, self._answer = self._answer, None
        self.abort()
        if answer is not None:
            answer.failed(UpstreamError(failure, message))


@dataclass(eq=False)
class ConnectionPool:
    """Connections to one engine, idle and in use, which it iterates. Its owner must `close` it.

    Calls of `send` may run at the same time, each on its own connection: the requests in flight
    bound the number of connections.
    """

    host: str  # name or address
    port: int  # TCP port
    timer: DeadlineTimer  # checks the deadlines
    # Tells which certificates to trust; the engine's must name `host`. None: it is plain.
    tls: Callable[[], ssl.SSLContext | None] = lambda: None
    cut_off: str = ""  # why none may be made any more; "": they may

    def __post_init__(self) -> None:
        self._open: set[ClientConnection] = set()
        self._idle: list[ClientConnection] = []
        self._closed = False

    def __iter__(self) -> Iterator[ClientConnection]:
        return iter(self._open)

    @property
    def idle(self) -> int:
        """Connections that are open and unused."""
        return len(self._idle)

    async def send(
        self,
        method: str,
        path: str,
        *,
        fields: bytes = b"",
        body: Sequence[bytes] = (),
        deadlines: Deadlines,
        once: bool = False,
    ) -> EngineResponse:
        """Send a request and return its answer when its head is there.

        Args:
            method: HTTP method.
            path: path and query.
            fields: header lines of this request, each with its line end; not checked.
            body: pieces of the body, sent one after another without being joined.
            deadlines: for connecting and for the first byte.
            once: never send it again, as after a stale connection (RFC 9110 9.2.2): use a new one.

        Raises:
            UpstreamError: the engine could not be reached or gave no answer in time. A cancelled
                call closes its connection.
        """
        head = b"%bcontent-length: %d\r\n%b\r\n" % (
            _request_head(method, path, self.host, self.port),
            sum(map(len, body)),
            fields,
        )
        connection = None if once else self._take()
        while True:
            fresh = connection is None
            if connection is None:
                connection = await self._connect(deadlines)
            answer = connection.send((head, *body), deadlines.first_byte_s)
            try:
                await answer.head()
            except UpstreamError as error:
                if fresh or not error.stale:
                    raise
                connection = None
            except BaseException:
                answer.close()
                raise
            else:
                return answer

    def close(self) -> None:
        """Close idle connections; those in use close when their answers end. `send` reopens it."""
        self._closed = True
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.abort()

    def cut(self, failure: Failure, why: str) -> None:
        """Cut all connections off for good, and those that are being made.

        An answer that is being read fails with `failure`, a request that was not sent as refused.
        """
        self.cut_off = why
        for connection in list(self._open):
            connection.cut(failure, why)

    def _take(self) -> ClientConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable():
                return connection
        return None

    async def _connect(self, deadlines: Deadlines) -> ClientConnection:
        loop, self._closed = asyncio.get_running_loop(), False
        try:
            async with asyncio.timeout(deadlines.connect_s):
                transport, connection = await loop.create_connection(
                    lambda: ClientConnection(loop, on_free=self._keep, on_gone=self._gone),
                    self.host,
                    self.port,
                    ssl=self.tls(),
                )
        except TimeoutError:
            message = f"no connection within {deadlines.connect_s:g} s"
            raise UpstreamError(Failure.CONNECT, message) from None
        except ConnectionRefusedError:
            raise UpstreamError(Failure.REFUSED, "the connection was refused") from None
        except OSError as error:
            failure = Failure.LOCAL if is_ours(error) else Failure.CONNECT
            raise UpstreamError(failure, f"no connection: {error.strerror}") from None
        keep_alive(transport.get_extra_info("socket"))
        if self.cut_off:
            connection.abort()
            raise UpstreamError(Failure.REFUSED, self.cut_off)
        self._open.add(connection)
        self.timer.add(connection)
        return connection

    def _keep(self, connection: ClientConnection) -> None:
        if self._closed or len(self._idle) >= _MAX_IDLE:
            connection.abort()
            return
        connection.keep(_KEEP_S)
        self._idle.append(connection)

    def _gone(self, connection: ClientConnection) -> None:
        self.timer.discard(connection)
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)


@lru_cache(maxsize=4096)
def _request_head(method: str, path: str, host: str, port: int) -> bytes:
    shown = f"[{host}]" if ":" in host else host
    return (
        f"{method} {path} HTTP/1.1\r\nhost: {shown}:{port}\r\naccept-encoding: identity\r\n"
    ).encode("latin-1")
