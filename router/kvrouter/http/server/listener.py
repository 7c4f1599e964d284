"""HTTP/1.1 server: listens, bounds and drains connections. Knows nothing of OpenAI or engines.

`TlsDoor` accepts connections that begin with a TLS handshake, and bounds those that have not ended
theirs: asyncio shows a connection to its protocol after the handshake, and without bounds those
that never say anything would take the descriptors of the whole process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from heapq import nsmallest
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from kvrouter.http.deadlines import DeadlineTimer
from kvrouter.http.server.connection import Connection
from kvrouter.http.server.exchange import Exchange
from kvrouter.http.server.limits import Limits
from kvrouter_store.connection.keep_alive import keep_alive
from kvrouter_store.system_errors import cannot_listen

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from kvrouter.http.server.cors import Cors

ACCEPTS_IN_A_ROW: Final = 64
PAUSE_S: Final = 0.1  # without descriptors, connections stay in the kernel's queue for so long
SHUTDOWN_S: Final = 5.0
Handler = Callable[[Exchange], Awaitable[None]]
AtHead = Callable[[Exchange], None]

_CUT_OFF_S = 1.0  # for clients to take the end of an answer that was cut off
_ABORT_S = 5.0
log = logging.getLogger(__name__)


@dataclass(eq=False)
class TlsDoor:
    """Listens on bound sockets, which it owns, until `close`; handshakes under way then go on."""

    sockets: Sequence[socket.socket]
    tls: ssl.SSLContext
    make: Callable[[], asyncio.Protocol]  # the protocol of one connection
    limits: Limits

    _handshakes: dict[asyncio.Task[None], None] = field(default_factory=dict)  # the oldest first

    def start(self) -> None:
        """Accept from now on."""
        for door in self.sockets:
            door.listen(self.limits.backlog)
            door.setblocking(False)
            self._watch(door)

    def close(self) -> None:
        """Accept no more. Idempotent."""
        for door in self.sockets:
            if door.fileno() >= 0:
                asyncio.get_running_loop().remove_reader(door)
                door.close()

    def _watch(self, door: socket.socket) -> None:
        if door.fileno() >= 0:
            asyncio.get_running_loop().add_reader(door, self._accept, door)

    def _accept(self, door: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(ACCEPTS_IN_A_ROW):
            try:
                link, _ = door.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("no connection can be accepted: %s", error.strerror)
                loop.remove_reader(door)
                loop.call_later(PAUSE_S, self._watch, door)
                return
            if len(self._handshakes) >= self.limits.handshakes:
                next(iter(self._handshakes)).cancel()
            task = loop.create_task(self._shake_hands(link), name="TLS handshake")
            self._handshakes[task] = None
            task.add_done_callback(self._handshakes.pop)

    async def _shake_hands(self, link: socket.socket) -> None:
        link.setblocking(False)
        with contextlib.suppress(OSError):  # TLS's errors and time-outs are such
            await asyncio.get_running_loop().connect_accepted_socket(
                self.make,
                link,
                ssl=self.tls,
                ssl_handshake_timeout=self.limits.handshake_timeout_s,
                ssl_shutdown_timeout=SHUTDOWN_S,
            )


@dataclass(eq=False)
class HttpServer:
    """Serves each request with one task of `handler(exchange)`.

    The handler's task is cancelled as soon as its client leaves. A handler that raises becomes a
    500, or a cut-off answer if it had started. Requests that are pipelined on one connection are
    served one after another. A server stops in three steps: `drain`, `stop_listening`, `close`.
    """

    handler: Handler  # answers each request
    limits: Limits = field(default_factory=Limits)  # of each connection, and of all
    # Called with each request when its head is there and its turn has come, or None. If it answers,
    # the rest of the body is not read, and the connection closes.
    at_head: AtHead | None = None
    cors: Cors | None = None  # adds header lines to each answer, or None
    incoming_bytes: int = 0  # what has come of bodies that are not whole yet
    draining: bool = False  # whether each answer is the last of its connection

    def __post_init__(self) -> None:
        self._date_line = b""
        self._date_s = 0
        self._stopped = False
        self._connections: set[Connection] = set()
        self._refused: dict[Connection, None] = {}  # the oldest first
        self._look_at = 0.0  # when silent ones are looked for again: it is a look at all
        self._listening: list[asyncio.Server | TlsDoor] = []
        self._timer: DeadlineTimer | None = None
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def connections(self) -> int:
        """Connections that are open, or have a handler that has not ended."""
        return len(self._connections)

    @property
    def refused(self) -> int:
        """Connections that were too many, and whose clients may still read so."""
        return len(self._refused)

    @property
    def port(self) -> int:
        """The port it listens on; raises RuntimeError if it does not listen."""
        sockets = [each for server in self._listening for each in server.sockets]
        if not sockets:
            raise RuntimeError("the server does not listen")
        return int(sockets[0].getsockname()[1])

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Accept connections on `host` and `port` (0: any free one); returns the port.

        With `tls` the port takes TLS alone. `::` takes IPv4 as well.

        OSError: the address cannot be bound.
        """
        try:
            if ":" in host:
                family, dual = socket.AF_INET6, socket.has_dualstack_ipv6()
                door = socket.create_server((host, port), family=family, dualstack_ipv6=dual)
                await self.serve(door, tls)
            else:
                self._listening = [await self._accept(tls, host=host, port=port)]
        except OSError as error:
            raise cannot_listen(host, port, error) from None
        return self.port

    async def serve(self, door: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """As `listen`, on a socket that is bound; the server closes it."""
        self._listening = [await self._accept(tls, sock=door)]

    async def renew(self, tls: ssl.SSLContext) -> None:
        """Use `tls` for new connections; none is refused meanwhile, and open ones stay.

        TLS sessions of the previous context are not resumed.

        OSError: there are no descriptors left; then nothing changes.
        """
        before, made = self._listening, list[asyncio.Server | TlsDoor]()
        if self.draining:
            return
        try:
            for each in [each for server in before for each in server.sockets]:
                again = socket.socket(fileno=os.dup(each.fileno()))
                made.append(await self._accept(tls, sock=again))
        except BaseException:
            before, made = made, before
            raise
        finally:
            self._listening = made
            for server in before:
                server.close()

    def drain(self) -> None:
        """Answer every request with `connection: close` from now on, and go on listening.

        Clients then connect again, to where a load balancer sends them. Idempotent.
        """
        self.draining = True
        for connection in self._connections:
            connection.drain()

    def stop_listening(self) -> None:
        """Accept no more connections, and close idle ones. Idempotent.

        Requests that have come, in whole or in part, are still answered.
        """
        self.drain()
        self._stopped = True
        for server in self._listening:
            server.close()
        for connection in list(self._connections):
            connection.close_idle()

    async def emptied(self) -> None:
        """Wait until no connection is left."""
        await self._empty.wait()

    async def close(self, grace_s: float = 0.0) -> None:
        """Stop listening; answers get `grace_s` to end, then their handlers are cancelled.

        What a cancelled handler still writes is sent, within a second.
        """
        self.stop_listening()
        await self._wait_empty(grace_s)
        for connection in list(self._connections):
            connection.cut_off()
        await self._wait_empty(_CUT_OFF_S)
        for connection in (*self._connections, *self._refused):
            connection.abort()
        await self._wait_empty(_ABORT_S)
        if self._timer is not None:
            self._timer.close()

    def add(self, connection: Connection) -> bool:
        """Note a new connection; False: there are too many, or the server has stopped.

        One that is refused may stay for a moment, until its client has read why; see `admit`.
        """
        if self._timer is not None:
            self._timer.add(connection)
        if self.admit(connection):
            return True
        self._bear(connection)
        return False

    def admit(self, connection: Connection) -> bool:
        """As `add`, of one that may have been refused: others may have left since."""
        if self._stopped or not self._has_room():
            return False
        self._refused.pop(connection, None)
        self._connections.add(connection)
        self._empty.clear()
        return True

    def discard(self, connection: Connection) -> None:
        """A connection has closed, and its handler has ended."""
        self._connections.discard(connection)
        self._refused.pop(connection, None)
        if self._timer is not None:
            self._timer.discard(connection)
        if not self._connections:
            self._empty.set()
        asking = next((each for each in self._refused if each.asks_for_place), None)
        if asking is not None:
            asking.take_place()

    def count_body(self, change_bytes: int) -> bool:
        """So much more, or less, is there of a body that is not whole; False: it is too much."""
        self.incoming_bytes += change_bytes
        return change_bytes < 0 or self.incoming_bytes <= self.limits.body_memory_bytes

    def date(self) -> bytes:
        """The `date` header line of RFC 9110 6.6.1, made once per second."""
        now = int(time.time())
        if now != self._date_s:
            self._date_s = now
            self._date_line = f"date: {formatdate(now, usegmt=True)}\r\n".encode("ascii")
        return self._date_line

    def _has_room(self) -> bool:
        """Whether one more may come. Of too many, those go that send no request."""
        now = asyncio.get_running_loop().time()
        if len(self._connections) >= self.limits.connections and now >= self._look_at:
            self._look_at, since = now + self.limits.tick_s, now - self.limits.patience_s
            silent = [each for each in self._connections if each.silent_since <= since]
            for each in nsmallest(self.limits.refused, silent, key=attrgetter("silent_since")):
                self._connections.discard(each)
                self._bear(each)
                each.give_way()
        return len(self._connections) < self.limits.connections

    def _bear(self, connection: Connection) -> None:
        """Leave a refused connection open for a moment; it ends the oldest of too many."""
        self._refused[connection] = None
        if len(self._refused) > self.limits.refused:
            oldest = next(iter(self._refused))
            del self._refused[oldest]  # now: it is lost only in the next turn of the loop
            oldest.transport.abort()

    async def _accept(self, tls: ssl.SSLContext | None, **where: Any) -> asyncio.Server | TlsDoor:
        loop = asyncio.get_running_loop()
        if self._timer is None:
            self._timer = DeadlineTimer(loop, self.limits.tick_s)
        server = await loop.create_server(
            lambda: Connection(self, loop),
            backlog=self.limits.backlog,
            start_serving=False,
            **where,
        )
        for each in server.sockets:
            keep_alive(each)
        if tls is None:
            await server.start_serving()
            return server
        sockets = [socket.socket(fileno=os.dup(each.fileno())) for each in server.sockets]
        server.close()
        door = TlsDoor(sockets, tls, lambda: Connection(self, loop), self.limits)
        door.start()
        return door

    async def _wait_empty(self, deadline_s: float) -> None:
        if not self._connections or deadline_s <= 0:
            await asyncio.sleep(0)
            return
        try:
            async with asyncio.timeout(deadline_s):
                await self._empty.wait()
        except TimeoutError:
            return
