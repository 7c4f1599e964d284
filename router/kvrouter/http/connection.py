"""One client connection: bytes in, exchanges out. Nothing is awaited.

A request that comes whole and plain in one read is parsed in one native call, any other piece by
piece by llhttp (httptools).
"""

import asyncio
import logging
from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, cast

import httptools

from kvrouter._native import scan_request
from kvrouter.errors import ApiError
from kvrouter.http.exchange import Exchange
from kvrouter.http.head import CONTINUE
from kvrouter.http.watch import NEVER

if TYPE_CHECKING:
    from kvrouter.http.server import HttpServer

_LINGER_S = 2.0
_VERSIONS = ("1.1", "1.0")

log = logging.getLogger("kvrouter.http")


class Phase(Enum):
    """What the parser is in the middle of; a handler may be at work at the same time."""

    IDLE = "idle"
    HEAD = "head"
    BODY = "body"
    REFUSED = "refused"


class _RefusedError(Exception):
    """Raised through the parser to stop it: the refusal is already noted."""


class Connection(asyncio.Protocol):
    """The server's side of one TCP connection.

    A client that leaves cancels the handler of the exchange under way at once. While a handler
    works the connection keeps reading, for only then does the end of the connection show.
    """

    __slots__ = (
        "_advanced",
        "_body",
        "_body_bytes",
        "_current",
        "_head_bytes",
        "_headers",
        "_limits",
        "_loop",
        "_parser",
        "_paused",
        "_peer",
        "_pending",
        "_phase",
        "_refusal",
        "_server",
        "_stalled_bytes",
        "_task",
        "_url",
        "_waiters",
        "expires_at",
        "transport",
    )

    def __init__(self, server: "HttpServer", loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._limits = server.limits
        self._loop = loop
        self._parser = httptools.HttpRequestParser(self)
        self._phase = Phase.IDLE
        self._url = b""
        self._headers: dict[str, str] = {}
        self._head_bytes = 0
        self._advanced = False  # whether the bytes at hand held a part of a body or a request's end
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._current: Exchange | None = None
        self._pending: deque[Exchange] = deque()
        self._task: asyncio.Task[None] | None = None
        self._paused = False
        self._stalled_bytes = 0
        self._waiters: list[asyncio.Future[None]] = []
        self._refusal: tuple[int, str] | None = None
        self._peer = ""
        self.expires_at = NEVER
        self.transport: asyncio.Transport

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Admit the connection, or refuse it with a 503 when there are too many."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        if not self._server.joined(self):
            self._say(503, "too many connections; try again")
            transport.close()
            return
        self.transport.set_write_buffer_limits(high=self._limits.write_buffer_bytes)
        name = transport.get_extra_info("peername")
        if isinstance(name, tuple):
            self._peer = f"{name[0]}:{name[1]}"
        self.expires_at = self._loop.time() + self._limits.idle_timeout_s

    def data_received(self, data: bytes) -> None:
        """Feed the parser; complete requests start their handlers from within."""
        if self._phase is Phase.REFUSED or self.transport.is_closing():
            return
        if self._phase is Phase.IDLE and self._current is None:
            limits = self._limits
            plain = scan_request(data, limits.head_bytes, limits.headers)
            if plain is not None and len(plain[4]) <= limits.body_bytes:
                self._begin(self._plain_exchange(plain))
                return
        self._advanced = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            return  # RFC 9110 7.8: the request was served as if it had not asked; then we close
        except httptools.HttpParserError:
            self._refuse()
            return
        if self._phase is not Phase.IDLE and not self._advanced:
            # Nothing but head, or trailers and the like behind a body: neither may go on for ever.
            self._head_bytes += len(data)
            if self._head_bytes > self._limits.head_bytes:
                self._refusal = (431, "the request's head or trailers are too large")
                self._refuse()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the handler under way and forget what was pipelined behind it."""
        del exc
        self.expires_at = NEVER
        self._pending.clear()
        self._release_waiters()
        current = self._current
        if current is None:
            self._server.left(self)
            return
        current.lost()
        if self._task is not None and not current.ended:
            self._task.cancel()

    def pause_writing(self) -> None:
        """The client reads too slowly: tell whoever produces, and start its deadline."""
        self._paused = True
        self._stalled_bytes = self.transport.get_write_buffer_size()
        self.expires_at = self._loop.time() + self._limits.write_timeout_s
        if self._current is not None and self._current.throttle is not None:
            self._current.throttle.pause()

    def resume_writing(self) -> None:
        """The client caught up."""
        self._paused = False
        self.expires_at = NEVER
        self._release_waiters()
        if self._current is None:
            self._await_next()
        elif self._current.throttle is not None:
            self._current.throttle.resume()

    # -- Channel

    def date_line(self) -> bytes:
        """See `HttpServer.date`."""
        return self._server.date()

    def paused(self) -> bool:
        """Whether the write buffer is above its bound."""
        return self._paused

    async def writable(self) -> None:
        """Return when the write buffer is below its bound, or the connection is gone."""
        if not self._paused or self.transport.is_closing():
            return
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        await waiter

    # -- Watched

    def expire(self) -> None:
        """A deadline passed: answer 408 where a request is half in, else just go."""
        self.expires_at = NEVER
        if self._paused:
            left_bytes = self.transport.get_write_buffer_size()
            if left_bytes < self._stalled_bytes:
                self._stalled_bytes = left_bytes
                self.expires_at = self._loop.time() + self._limits.write_timeout_s
                return
            self.transport.abort()
        elif self._current is not None:
            return
        elif self._phase in (Phase.HEAD, Phase.BODY):
            self._say(408, "the request did not arrive in time")
        else:
            self.transport.abort()

    # -- callbacks of the parser

    def on_message_begin(self) -> None:
        """A request line starts."""
        self._phase = Phase.HEAD
        self._url = b""
        self._headers = {}
        self._head_bytes = 0
        self._body = []
        self._body_bytes = 0
        if self._current is None:
            self.expires_at = self._loop.time() + self._limits.head_timeout_s

    def on_url(self, url: bytes) -> None:
        """A piece of the request target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header; those after the body (trailers) are dropped."""
        if self._phase is not Phase.HEAD:
            return
        headers = self._headers
        self._head_bytes += len(name) + len(value)
        if len(headers) >= self._limits.headers or self._head_bytes > self._limits.head_bytes:
            self._stop(431, "the request's head is too large")
        key = name.decode("latin-1").lower()
        text = value.decode("latin-1")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text

    def on_headers_complete(self) -> None:
        """Refuse a body that is too large before it comes; answer an expectation."""
        headers = self._headers
        if self._parser.get_http_version() not in _VERSIONS:
            self._stop(400, "the version of HTTP is neither 1.1 nor 1.0")
        length = headers.get("content-length")
        if length is not None and int(length) > self._limits.body_bytes:
            self._stop(413, f"the body is larger than {self._limits.body_bytes} bytes")
        self._phase = Phase.BODY
        self._head_bytes = 0
        if self._current is None:
            self.expires_at = self._loop.time() + self._limits.body_timeout_s
            if headers.get("expect", "").lower() == "100-continue":
                self.transport.write(CONTINUE)

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._advanced = True
        self._head_bytes = 0
        self._body_bytes += len(body)
        if self._body_bytes > self._limits.body_bytes:
            self._stop(413, f"the body is larger than {self._limits.body_bytes} bytes")
        self._body.append(body)

    def on_message_complete(self) -> None:
        """The request is whole: serve it, or queue it behind the one under way."""
        exchange = self._exchange()
        self._advanced = True
        self._phase = Phase.IDLE
        self._body = []
        if self._current is None:
            self._begin(exchange)
            return
        self._pending.append(exchange)
        if len(self._pending) >= self._limits.pipelined:
            self.transport.pause_reading()

    # -- what the server calls

    def drain(self) -> None:
        """Close when the answer under way is over, now if there is none."""
        if self._current is None:
            self.transport.close()
        else:
            self._current.keep_alive = self._current.keep_alive and self._current.started

    def abort(self) -> None:
        """Close now; the handler is cancelled."""
        self.transport.abort()
        if self._task is not None:
            self._task.cancel()

    # -- inside

    def _exchange(self) -> Exchange:
        url = self._url
        if not url.startswith(b"/") and b"://" in url:  # absolute form, RFC 9112 3.2.2
            url = b"/" + url.partition(b"://")[2].partition(b"/")[2]
        path, _, query = url.decode("latin-1").partition("?")
        parser = self._parser
        body = self._body
        return Exchange(
            self,
            method=parser.get_method().decode("ascii"),
            path=path,
            query=query,
            headers=self._headers,
            body=body[0] if len(body) == 1 else b"".join(body),
            peer=self._peer,
            keep_alive=parser.should_keep_alive()
            and not parser.should_upgrade()
            and not self._server.draining,
            http_1_1=parser.get_http_version() == "1.1",
        )

    def _plain_exchange(self, plain: tuple[str, str, str, dict[str, str], bytes, bool]) -> Exchange:
        method, path, query, headers, body, keep_alive = plain
        return Exchange(
            self,
            method=method,
            path=path,
            query=query,
            headers=headers,
            body=body,
            peer=self._peer,
            keep_alive=keep_alive and not self._server.draining,
            http_1_1=True,
        )

    def _begin(self, exchange: Exchange) -> None:
        self.expires_at = NEVER
        self._current = exchange
        self._task = self._loop.create_task(self._run(exchange))

    async def _run(self, exchange: Exchange) -> None:
        try:
            await self._server.handler(exchange)
        except asyncio.CancelledError:
            exchange.keep_alive = False
        except Exception:
            log.exception("the handler of %s %s failed", exchange.method, exchange.path)
            exchange.keep_alive = False
            if not exchange.started:
                exchange.respond(500, ApiError(500, "internal error").body())
        finally:
            self._finish(exchange)

    def _finish(self, exchange: Exchange) -> None:
        self._task = None
        self._current = None
        if exchange.counted_by is not None:
            exchange.counted_by.ended += 1
        if exchange.closed:
            self._server.left(self)
            return
        if not exchange.ended or not exchange.keep_alive or self._server.draining:
            self.transport.close()
            return
        if self._pending:
            self.transport.resume_reading()
            self._begin(self._pending.popleft())
            return
        self._await_next()

    def _await_next(self) -> None:
        if self._paused:  # its deadline is running and stays
            return
        limits, now = self._limits, self._loop.time()
        if self._phase is Phase.HEAD:  # a pipelined request is half in
            self.expires_at = now + limits.head_timeout_s
        elif self._phase is Phase.BODY:
            self.expires_at = now + limits.body_timeout_s
        elif self._phase is Phase.IDLE:
            self.expires_at = now + limits.idle_timeout_s

    def _stop(self, status: int, message: str) -> None:
        self._refusal = (status, message)
        raise _RefusedError

    def _refuse(self) -> None:
        status, message = self._refusal or (400, "this is not an HTTP/1.1 request")
        if self._current is not None:  # an answer is under way: it must not be mixed with ours
            self._current.keep_alive = False
            self.transport.pause_reading()
            return
        self._say(status, message)

    def _say(self, status: int, message: str) -> None:
        exchange = self._plain_exchange(("POST", "", "", {}, b"", False))
        exchange.respond(status, ApiError(status, message).body())
        self._phase = Phase.REFUSED
        if self.transport.can_write_eof():
            # Closing with bytes unread would reset the connection and the client might never see
            # the answer (RFC 9112 9.6): it may send on for a while, and what it sends is dropped.
            self.transport.write_eof()
            self.expires_at = self._loop.time() + _LINGER_S
        else:
            self.transport.close()

    def _release_waiters(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
