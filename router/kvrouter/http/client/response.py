"""An engine's HTTP answer as it comes in. Bytes go on as they arrive."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from kvrouter._native import StreamFeed
from kvrouter.http.failure import Failure
from kvrouter.http.headers import unchunk

if TYPE_CHECKING:
    from kvrouter.http.client.pool import ClientConnection

_UNREAD_BYTES = 1024 * 1024


class UpstreamError(Exception):
    """An engine could not be asked or did not answer well."""

    def __init__(self, failure: Failure, message: str, *, stale: bool = False) -> None:
        super().__init__(message)
        self.failure = failure  # what went wrong, as the pool counts it
        # No byte came back on a kept connection: the engine has probably just closed it, and a new
        # one is worth a try.
        self.stale = stale


class BodySink(Protocol):
    """Takes a relayed body, from within the loop's read callback; never blocks."""

    @property
    def paused(self) -> bool:
        """Whether the body is to pause."""

    @property
    def passer(self) -> Callable[[bytes], None] | None:
        """Takes chunk frames as they came; None: `write` takes the body without them."""

    def write(self, data: bytes) -> None:
        """Take the next bytes of the body."""


class EngineResponse:
    """One answer: its head when `ConnectionPool.send` returns it, its body by `read` or `relay_to`.

    The owner must take the body to its end or `close`. Closing before the end, or cancelling `read`
    or `relay_to`, closes the connection, so that the engine stops.

    It keeps no exception: a raised one holds its frames, and they hold the answer.

    Attributes:
        framed: whether its pieces are whole chunk frames, as they came; else they are plain.
        streams: whether it is a stream of events, of which only those with data keep it alive.
    """

    __slots__ = (
        *("_body", "_body_bytes", "_comments", "_connection", "_done", "_failure", "_first"),
        *("_head", "_limit_bytes", "_loop", "_paused", "_sink"),
        *("complete", "feed", "framed", "headers", "status", "streams"),
    )

    def __init__(self, connection: "ClientConnection", loop: asyncio.AbstractEventLoop) -> None:
        self._connection: ClientConnection | None = connection
        self._loop = loop
        self._head: asyncio.Future[None] = loop.create_future()
        self._first: asyncio.Future[None] | None = None
        self._done: asyncio.Future[None] | None = None
        self._failure: tuple[Failure, str, bool] | None = None
        self._comments: Callable[[bytes], None] | None = None
        self._sink: BodySink | None = None
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._limit_bytes = _UNREAD_BYTES
        self._paused = False
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []  # as sent, names in lower case
        self.complete = False  # whether the whole body has come
        # Counts what comes of the body, if it has chunk frames or is a stream of events.
        self.feed: StreamFeed | None = None
        self.framed = self.streams = False

    def header(self, name: bytes) -> str | None:
        """Value of the header `name` (lower case); None if it is absent."""
        for key, value in self.headers:
            if key == name:
                return value.decode("latin-1")
        return None

    @property
    def coding(self) -> str | None:
        """The coding of its body, if it has one although none was asked for."""
        coding = self.header(b"content-encoding")
        return None if coding is None or coding.lower() == "identity" else coding[:40]

    async def head(self) -> None:
        """Wait for status and headers. Raises UpstreamError if they do not come."""
        await self._head
        if not self.status:
            self._check()

    def whole(self, limit_bytes: int) -> bytes | None:
        """The body, if all of it is there and within the limit; else None."""
        if not self.complete or self._body_bytes > limit_bytes:
            return None
        return self._joined()

    async def read(self, limit_bytes: int, deadline_s: float) -> bytes:
        """The whole body.

        UpstreamError: it broke off, did not come in time, or is larger than `limit_bytes`.
        """
        if not await self.gather(limit_bytes, deadline_s):
            self.close()
            raise UpstreamError(Failure.TOO_LARGE, f"the answer exceeds {limit_bytes} bytes")
        return self._joined()

    async def gather(self, limit_bytes: int, deadline_s: float) -> bool:
        """Wait for all of the body, or for more than `limit_bytes`, then pause; whether it is all.

        UpstreamError: it broke off, or did not come in time.
        """
        if not self.complete and self._body_bytes <= limit_bytes:
            self._limit_bytes = limit_bytes
            self.resume()
            if self._connection is not None:
                self._connection.expect(deadline_s, each=False)
            await self._wait_for_rest()
        return self.complete and self._body_bytes <= limit_bytes

    @property
    def begun(self) -> bool:
        """Whether a stream of events has data: until then another engine can still answer."""
        return self.feed is not None and self.feed.last_data_s > 0

    async def first_event(self, deadline_s: float, comments: Callable[[bytes], None]) -> None:
        """Wait until this stream of events has begun or is over. `comments` gets what comes before.

        UpstreamError: it broke off, or did not begin in time.
        """
        self.streams = True
        if self.feed is None:
            self.feed = StreamFeed()
            self.feed.note(b"".join(self._body))
        if self.begun or self.complete:
            return
        if self._connection is not None:
            self._connection.expect(deadline_s, each=False)
        self._check()
        self._first, self._comments = self._loop.create_future(), comments
        self._wait_for_data(self._first)
        try:
            await self._first
            if not self.begun:
                self._check()
        except BaseException:
            self.close()
            raise
        finally:
            self._comments = None  # it may know who holds this answer

    def beginning(self, limit_bytes: int) -> bytes:
        """The first bytes of the body, as they came, perhaps in chunk frames."""
        return b"".join(self._body)[:limit_bytes]

    async def relay_to(self, sink: BodySink, idle_deadline_s: float) -> None:
        """Pass the body to `sink` as it comes; return at its end.

        Seconds of pauses do not count towards the deadline between two pieces.

        UpstreamError: the body broke off, or nothing came within the deadline.
        """
        self._sink = sink
        body, self._body = self._body, []
        if body:
            piece = body[0] if len(body) == 1 else b"".join(body)
            if self.framed and (passer := sink.passer) is not None:
                passer(piece)
            else:
                self._write(piece, sink)
        if self._connection is not None:
            self._connection.passer = sink.passer if self.framed else None
            self._connection.expect(idle_deadline_s, each=True)
            if sink.paused:
                self._paused = True
                self._connection.pause()
            else:
                self.resume()
        try:
            await self._wait_for_rest()
        finally:
            self._sink = None  # it knows this answer
            self.close()

    def pause(self) -> None:
        """Read nothing from the engine until `resume`."""
        if not self._paused and self._connection is not None:
            self._paused = True
            self._connection.pause()

    def resume(self) -> None:
        """Go on after `pause`."""
        if self._paused:
            self._paused = False
            if self._connection is not None:
                self._connection.resume()

    def close(self) -> None:
        """Close the connection, unless the body is whole. Idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()

    # -- for the connection

    def arrived(self, status: int) -> None:
        """The head is there."""
        self.status = status
        if not self._head.done():
            self._head.set_result(None)

    def data(self, data: bytes) -> None:
        """The next bytes of the body."""
        if self.feed is not None and not self.framed:
            self.feed.note(data)
        if self._sink is not None:
            self._write(data, self._sink)
            return
        self._body.append(data)
        self._body_bytes += len(data)
        waits = self._first is not None and not self._first.done()
        if self._first is not None and waits:
            self._wait_for_data(self._first)
        if self._body_bytes > self._limit_bytes:
            if waits:
                self.failed(UpstreamError(Failure.ANSWER, "the answer is too large"))
                self.close()
            else:
                self.pause()
                if self._done is not None and not self._done.done():
                    self._done.set_result(None)

    def completed(self) -> None:
        """The body is whole; the connection is free again."""
        self._connection = None
        self.complete = True
        for future in (self._first, self._done):
            if future is not None and not future.done():
                future.set_result(None)

    def failed(self, error: UpstreamError) -> None:
        """Nothing more will come."""
        self._failure = error.failure, str(error), error.stale
        for future in (self._head, self._first, self._done):
            if future is not None and not future.done():
                future.set_result(None)

    # -- inside

    def _joined(self) -> bytes:
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        return unchunk(body) if self.framed else body

    def _write(self, data: bytes, sink: BodySink) -> None:
        sink.write(unchunk(data) if self.framed else data)

    def _wait_for_data(self, first: asyncio.Future[None]) -> None:
        """Pass comments on while there is nothing else; end the wait when there is."""
        if self.begun:
            first.set_result(None)
        elif self._body and self.feed is not None and self.feed.between_events:
            comments, self._body_bytes = self._joined(), 0
            self._body.clear()
            if self._comments is not None:
                self._comments(comments)

    async def _wait_for_rest(self) -> None:
        if self.complete:
            return
        try:
            self._check()
            self._done = self._loop.create_future()
            await self._done
            self._check()
        except BaseException:
            self.close()
            raise

    def _check(self) -> None:
        if self._failure is not None:
            failure, message, stale = self._failure
            raise UpstreamError(failure, message, stale=stale)
