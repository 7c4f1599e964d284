"""One client connection: bytes in, exchanges out, one after another. Nothing is awaited."""

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from kvrouter.errors import FAILED, ApiError
from kvrouter.http.deadlines import NEVER
from kvrouter.http.headers import CONTINUE
from kvrouter.http.server.exchange import Exchange
from kvrouter.http.server.limits import FULL, Limits
from kvrouter.http.server.reader import Phase, Reader

if TYPE_CHECKING:
    from kvrouter.http.server.listener import HttpServer

_LINGER_S = 2.0
_PLACE_S = 0.25
"""In which a connection too many may find a place: those who left may not have been noticed yet."""
_CROWDED = ApiError(503, "the server takes no more connections; try again", retry_after_s=1)
_FULL = ApiError(503, FULL, retry_after_s=1)

log = logging.getLogger("kvrouter.http")


@dataclass(eq=False, repr=False, slots=True)
class Connection(asyncio.Protocol):
    """The server's side of one TCP connection.

    A client that leaves cancels the handler of its request at once. So the connection never stops
    reading: only then does its end show. While a handler works, what comes is held without being
    parsed. If it is more than may be held, the connection closes after the answers that are due.
    """

    server: "HttpServer"
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport = field(init=False)
    expires_at: float = NEVER
    paused: bool = False  # whether the write buffer is above its bound
    _limits: Limits = field(init=False)
    _reader: Reader = field(init=False)
    _awaited: Phase = Phase.IDLE  # what the deadline is for, while no handler works
    _charged_bytes: int = 0  # of an incoming body, as the server counts it
    _incoming: Exchange | None = None  # its head is there, its body is not
    _head_checked: bool = False  # whether its head was checked
    _pending: deque[Exchange] = field(default_factory=deque)  # whole, behind the current one
    _current: Exchange | None = None
    _task: asyncio.Task[None] | None = None
    _held: list[bytes] = field(default_factory=list)
    _held_bytes: int = 0
    _lingers: bool = False  # whether to close only when the client has read the last answer
    _waits: bool = False  # for a place: there was none when it came
    _stalled_bytes: int = 0
    _waiters: list[asyncio.Future[None]] = field(default_factory=list)
    _peer: str = ""

    def __post_init__(self) -> None:
        self._limits = self.server.limits

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Admit the connection; one too many waits until its client says something."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        self._reader = Reader(self._limits, self)  # a TLS handshake that fails needs none
        if self.server.add(self):
            self._admitted()
        else:
            self._waits, self.expires_at = True, self.loop.time() + _LINGER_S

    def _admitted(self) -> None:
        self.transport.set_write_buffer_limits(high=self._limits.write_buffer_bytes)
        name = self.transport.get_extra_info("peername")
        if isinstance(name, tuple):
            self._peer = f"{name[0]}:{name[1]}"
        self.expires_at = self.loop.time() + self._limits.idle_timeout_s

    def data_received(self, data: bytes) -> None:
        """Feed the reader; complete requests start their handlers from within."""
        if self._waits:
            self._ask_for_place(data)
        elif self._current is None:
            self._feed(data)
        elif self._reader.phase is not Phase.STOPPED:
            self._held.append(data)
            self._held_bytes += len(data)
            if self._held_bytes > self._limits.pipelined_bytes:
                self._stop_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the handler; drop all that was held."""
        del exc
        self.expires_at = NEVER
        self._drop_input()
        self._reader.close()
        self._pending.clear()
        self._release_waiters()
        current = self._current
        if current is None:
            self.server.discard(self)
            return
        current.lost()
        if self._task is not None and not current.ended:
            self._task.cancel()

    def pause_writing(self) -> None:
        """The client reads too slowly: throttle the answer, and start the deadline."""
        self.paused = True
        self._stalled_bytes = self.transport.get_write_buffer_size()
        self.expires_at = self.loop.time() + self._limits.write_timeout_s
        if self._current is not None and self._current.throttle is not None:
            self._current.throttle.pause()

    def resume_writing(self) -> None:
        """The client caught up."""
        self.paused = False
        self.expires_at = NEVER
        self._release_waiters()
        if self._current is None:
            self._expect()
        elif self._current.throttle is not None:
            self._current.throttle.resume()

    # -- ServerChannel

    async def writable(self) -> None:
        """Return when the write buffer is below its bound, or the connection is gone."""
        if not self.paused or self.transport.is_closing():
            return
        waiter = self.loop.create_future()
        self._waiters.append(waiter)
        await waiter

    # -- HasDeadline

    def expire(self) -> None:
        """A deadline passed: answer 408 to an incoming request, else close."""
        self.expires_at = NEVER
        if self.paused:
            left_bytes = self.transport.get_write_buffer_size()
            if left_bytes < self._stalled_bytes:
                self._stalled_bytes = left_bytes
                self.expires_at = self.loop.time() + self._limits.write_timeout_s
                return
            self.transport.abort()
        elif self._current is not None:
            return
        elif self._waits:
            self.give_way()
        elif self._reader.phase in (Phase.HEAD, Phase.BODY):
            self._deny(ApiError(408, "the request did not arrive in time"))
        else:
            self.transport.abort()

    # -- Requests

    def begin(
        self,
        *,
        method: str,
        path: str,
        query: str,
        headers: dict[str, str],
        keep_alive: bool,
        http_1_1: bool,
    ) -> None:
        """The head of a request is whole."""
        self._head_checked = False
        self._incoming = Exchange(
            self,
            method=method,
            path=path,
            query=query,
            headers=headers,
            peer=self._peer,
            keep_alive=keep_alive,
            http_1_1=http_1_1,
        )
        if self.server.cors is not None:
            self._incoming.added = self.server.cors.fields(path, headers)

    def complete(self, body: bytes) -> bool:
        """The request is whole: serve it, or queue it behind the current one."""
        exchange, self._incoming = self._incoming, None
        assert exchange is not None
        exchange.body = body
        if self.server.draining:
            exchange.keep_alive = False
        if self._current is None:
            if self._head_checked or self._check_head(exchange):
                self._serve(exchange)
            elif exchange.keep_alive:
                self._expect()
            return exchange.keep_alive
        self._pending.append(exchange)
        if len(self._pending) >= self._limits.pipelined:
            exchange.keep_alive = False
            self._lingers = True
        return exchange.keep_alive

    # -- what the server calls

    def drain(self) -> None:
        """Have the last answer that is due say that the connection closes, if it has not begun."""
        last = self._pending[-1] if self._pending else self._current
        if last is not None and not last.started:
            last.keep_alive = False

    def close_idle(self) -> None:
        """Close now, unless a request is served or coming in; a head must then come soon."""
        if self._current is not None:
            return
        phase = self._reader.phase
        if phase is Phase.IDLE:
            self.transport.close()
        elif phase is Phase.HEAD:
            self.expires_at = min(self.expires_at, self.loop.time() + _LINGER_S)

    @property
    def silent_since(self) -> float:
        """Since when a whole head has been due, on the loop's clock; NEVER: none is due."""
        phase, limits = self._reader.phase, self._limits
        if self._current is not None or self.paused or phase not in (Phase.IDLE, Phase.HEAD):
            return NEVER
        due_s = limits.idle_timeout_s if phase is Phase.IDLE else limits.head_timeout_s
        return self.expires_at - due_s

    @property
    def asks_for_place(self) -> bool:
        """Whether it was refused, and its client has sent something since."""
        return self._waits and bool(self._held)

    def take_place(self) -> bool:
        """Go on as if it had not been refused, if the server has room now."""
        if not self.server.admit(self):
            return False
        self._waits = False
        self._admitted()
        held, self._held_bytes = b"".join(self._held), 0
        self._held.clear()
        self._feed(held)
        return True

    def give_way(self) -> None:
        """Close, for there is no place for it: the answer to what it may send is a 503."""
        self._waits = False
        self._deny(_CROWDED)

    def cut_off(self) -> None:
        """Cancel the handler, which may end its answer by itself; then close."""
        current, task = self._current, self._task
        if current is None:
            self.transport.close()
        elif task is not None and not current.closed and not current.ended:
            # Not at once: a task that is cancelled before its first step never runs at all.
            self.loop.call_soon(task.cancel)

    def abort(self) -> None:
        """Close now; the handler is cancelled."""
        self.transport.abort()
        if self._task is not None:
            self._task.cancel()

    # -- inside

    def _ask_for_place(self, data: bytes) -> None:
        """Take a place that has come free since, or that does within a moment; else the 503."""
        if not self._held:
            self.expires_at = self.loop.time() + _PLACE_S
        self._held.append(data)
        self._held_bytes += len(data)
        if not self.take_place() and self._held_bytes > self._limits.pipelined_bytes:
            self.give_way()

    def _feed(self, data: bytes) -> None:
        refusal = self._reader.feed(data)
        if self._reader.body_bytes != self._charged_bytes and not self._charge():
            refusal = _FULL
        if refusal is not None and self._current is None:
            self._deny(refusal)
        elif refusal is not None:  # it came behind a request whose answer must not be touched
            self._stop_reading()
        elif self._current is None:
            incoming = self._incoming
            if incoming is not None and not (self._head_checked or self._check_head(incoming)):
                return
            if self._reader.phase is not self._awaited:
                self._expect()

    def _charge(self) -> bool:
        """Have the server count the incoming body. False: bodies take too much memory."""
        change = self._reader.body_bytes - self._charged_bytes
        self._charged_bytes += change
        return self.server.count_body(change)

    def _check_head(self, exchange: Exchange) -> bool:
        """The turn of a request has come: show its head to `at_head`. False: it was refused."""
        coming = self._head_checked = exchange is self._incoming
        if self.server.at_head is not None:
            keep_alive = exchange.keep_alive
            exchange.keep_alive = keep_alive and not coming  # of an answer now: the body is unread
            self.server.at_head(exchange)
            if exchange.ended:
                if not exchange.keep_alive:
                    self._linger()
                return False
            exchange.keep_alive = keep_alive
        if coming and exchange.expects_continue:
            self.transport.write(CONTINUE)
        return True

    def _serve(self, exchange: Exchange) -> None:
        self.expires_at = NEVER
        self._awaited = Phase.IDLE
        self._current = exchange
        self._task = self.loop.create_task(self._run(exchange))

    async def _run(self, exchange: Exchange) -> None:
        try:
            await self.server.handler(exchange)
        except asyncio.CancelledError:
            exchange.keep_alive = False
            if not (exchange.started or exchange.ended or exchange.closed):
                error = ApiError(503, "The server is stopping; try again.", retry_after_s=1)
                exchange.respond(error.status, error.body(exchange.path), headers=error.headers())
        except Exception:
            log.exception("the handler of %s %s failed", exchange.method, exchange.path)
            exchange.keep_alive = False
            if not exchange.started:
                exchange.respond(FAILED.status, FAILED.body(exchange.path))
        finally:
            self._finish(exchange)

    def _finish(self, exchange: Exchange) -> None:
        self._task = None
        self._current = None
        last = self.server.draining and not self._pending
        if exchange.closed:
            self.server.discard(self)
        elif exchange.ended and exchange.keep_alive and not last:
            self._go_on()
        elif exchange.ended and self._lingers:
            self._linger()
        else:
            self.transport.close()

    def _go_on(self) -> None:
        """Serve what came while the handler worked."""
        while self._pending:
            exchange = self._pending.popleft()
            if self._check_head(exchange):
                self._serve(exchange)
            if self._current is not None or not exchange.keep_alive:
                return
        if self._incoming is not None and not self._check_head(self._incoming):
            return
        held, self._held, self._held_bytes = self._held, [], 0
        self._expect()
        if held:
            self._feed(b"".join(held))

    def _expect(self) -> None:
        """Begin the deadline for what comes next."""
        phase = self._awaited = self._reader.phase
        if self.paused or phase is Phase.STOPPED:  # then another deadline runs and stays
            return
        limits = self._limits
        if phase is Phase.HEAD:
            timeout_s = limits.head_timeout_s
        elif phase is Phase.BODY:
            timeout_s = limits.body_timeout_s
        else:
            timeout_s = limits.idle_timeout_s
        self.expires_at = self.loop.time() + timeout_s

    def _stop_reading(self) -> None:
        """Drop what comes from now on; close after the answers to what is whole."""
        self._drop_input()
        self._lingers = True
        last = self._pending[-1] if self._pending else self._current
        if last is not None:
            last.keep_alive = False

    def _drop_input(self) -> None:
        self._reader.stop()
        self._charge()
        self._incoming = None
        self._held.clear()

    def _deny(self, refusal: ApiError) -> None:
        """Answer a request that became no exchange, and close."""
        exchange = Exchange(self, headers={})
        if self._incoming is not None:
            exchange.added = self._incoming.added
        exchange.respond(refusal.status, refusal.body(), headers=refusal.headers())
        self._linger()

    def _linger(self) -> None:
        """Close when the client has read the answer.

        Closing with bytes unread would reset the connection and the client might never see the
        answer (RFC 9112 9.6): it may send on for a while, and what it sends is dropped.
        """
        self._drop_input()
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.expires_at = self.loop.time() + _LINGER_S
        else:
            self.transport.close()

    def _release_waiters(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
