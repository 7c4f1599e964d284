"""One HTTP request and the way to answer it. Writes to the transport at once and never blocks."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvrouter.http.headers import (
    JSON,
    LAST_CHUNK,
    Headers,
    chunk,
    chunk_head,
    encode_headers,
    status_line,
)

if TYPE_CHECKING:
    from kvrouter.http.server.listener import HttpServer

_SPLIT_FRAME_BYTES = 16 * 1024
BODILESS = frozenset({204, 304})


class Throttle(Protocol):
    """A source of the answer's bytes that can pause."""

    def pause(self) -> None:
        """The client reads too slowly: produce nothing until `resume`."""

    def resume(self) -> None:
        """The client caught up."""


class ServerChannel(Protocol):
    """The connection that an exchange came in on."""

    transport: asyncio.Transport
    server: "HttpServer"  # bounds bodies, knows the date
    paused: bool  # whether the write buffer is above its bound

    async def writable(self) -> None:
        """Return when the write buffer is below its bound."""


@dataclass(eq=False, repr=False, slots=True)
class Exchange:
    """A parsed request, and `respond`, or `start`/`write`/`end`, to answer it.

    Owned by its handler. When the client leaves, `closed` turns true, the callbacks of `on_close`
    run and the handler's task is cancelled, all at once; later writes are dropped. An answer that
    was started but not ended when the handler returns is cut off, so that the client sees it.
    """

    channel: ServerChannel
    headers: dict[str, str]  # names in lower case; a repeated header is joined with ", "
    method: str = ""  # as sent, upper case; empty if the request broke before it was parsed
    path: str = ""  # as sent, not percent-decoded, without the query and a slash at its end
    query: str = ""
    body: bytes = b""  # the whole body; empty until it is there
    peer: str = ""  # address of the client, "host:port"
    keep_alive: bool = False
    http_1_1: bool = True
    closed: bool = False
    started: bool = False
    ended: bool = False
    status: int = 0
    throttle: Throttle | None = None  # pauses and resumes what relays bytes into this exchange
    # What authentication found out about the client; not used in this package.
    principal: object | None = None
    added: bytes = b""  # header lines, each with its line end, that any answer carries
    _callbacks: tuple[Callable[[], None], ...] = ()
    _chunked: bool = False
    _held: bytes = b""
    _muted: bool = False  # whether the answer has no body

    @property
    def expects_continue(self) -> bool:
        """Whether the client waits for a 100 before it sends the body (RFC 9110 10.1.1)."""
        return self.http_1_1 and self.headers.get("expect", "").lower() == "100-continue"

    def respond(
        self,
        status: int,
        body: bytes = b"",
        *,
        content_type: str = JSON,
        headers: Headers = (),
        fields: bytes = b"",
    ) -> None:
        """Send a whole answer.

        `headers` are checked; `fields` are header lines, each with its line end, and are not.

        RuntimeError: an answer was started already. ValueError: a header would break its line.
        """
        self._begin(status)
        fields += self.added + encode_headers(headers)
        self.ended = True
        if self.closed:
            return
        head = b"%b%b%bcontent-type: %b\r\ncontent-length: %d\r\n%b\r\n" % (
            status_line(status),
            self.channel.server.date(),
            fields,
            content_type.encode("latin-1"),
            len(body),
            self._connection_line(),
        )
        self.channel.transport.write(head if self._muted else head + body)

    def start(
        self, status: int, headers: Headers = (), *, fields: bytes = b"", hold: bool = False
    ) -> None:
        """Send the head of an answer whose length is unknown; `write` and `end` follow.

        With `hold` the head goes with the first bytes of the body; else as `respond`.
        """
        self._begin(status)
        lines = self.added + encode_headers(headers)
        if self.closed:
            return
        if status in BODILESS:
            self._muted = True
        elif self.http_1_1:
            self._chunked = True
            fields += b"transfer-encoding: chunked\r\n"
        else:
            self.keep_alive = False
        head = b"%b%b%b%b%b\r\n" % (
            status_line(status),
            self.channel.server.date(),
            lines,
            fields,
            self._connection_line(),
        )
        if hold:
            self._held = head
        else:
            self.channel.transport.write(head)

    def write(self, data: bytes) -> None:
        """Send a piece of the body. Never blocks: see `paused`, `throttle` and `drain`."""
        if self.closed or self._muted or not data:
            return
        transport = self.channel.transport
        if self._held:
            self._write_held(b"")
        if not self._chunked:
            transport.write(data)
        elif len(data) < _SPLIT_FRAME_BYTES:
            transport.write(chunk(data))
        else:
            transport.write(chunk_head(len(data)))
            transport.write(data)
            transport.write(b"\r\n")

    def frame_writer(self) -> Callable[[bytes], None] | None:
        """Sends chunk frames as they are, after `start`; None if this client takes none."""
        if not self._chunked or self._muted or self.closed:
            return None
        return self._write_held if self._held else self.channel.transport.write

    def end(self) -> None:
        """The body is whole. A second call does nothing."""
        if self.ended:
            return
        self.ended = True
        self.throttle = None
        if self._held and not self.closed:
            self._write_held(b"")
        if self._chunked and not self.closed and not self._muted:
            self.channel.transport.write(LAST_CHUNK)

    @property
    def paused(self) -> bool:
        """Whether the client reads too slowly for what was written so far."""
        return self.channel.paused

    async def drain(self) -> None:
        """Return when the write buffer is below its bound; cancelled when the client leaves."""
        await self.channel.writable()

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the client leaves before the answer's end; now if it has left."""
        if self.closed:
            callback()
        else:
            self._callbacks += (callback,)

    def abort(self) -> None:
        """Cut the answer off: the connection closes, and the client sees an incomplete body."""
        self.keep_alive = False
        self.ended = True
        self.throttle = None
        self.channel.transport.close()

    def lost(self) -> None:
        """The connection is gone: for the connection to call."""
        if self.closed:
            return
        self.closed = True
        self.throttle = None
        callbacks, self._callbacks = self._callbacks, ()
        for callback in callbacks:
            callback()

    def _write_held(self, data: bytes) -> None:
        """Send the head that was held, and with it `data`."""
        held, self._held = self._held, b""
        if not self.closed:
            self.channel.transport.write(held + data)

    def _begin(self, status: int) -> None:
        if self.started:
            raise RuntimeError("this exchange has been answered already")
        self.started = True
        self.status = status
        self._muted = self.method == "HEAD"

    def _connection_line(self) -> bytes:
        if not self.keep_alive:
            return b"connection: close\r\n"
        return b"" if self.http_1_1 else b"connection: keep-alive\r\n"
