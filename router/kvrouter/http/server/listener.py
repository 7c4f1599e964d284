"""HTTP/1.1 server: listens, bounds and drains connections. Knows nothing of OpenAI or engines."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable
from email.utils import formatdate
from typing import TYPE_CHECKING, Any

from kvrouter.http.deadlines import DeadlineTimer
from kvrouter.http.server.connection import Connection
from kvrouter.http.server.exchange import Exchange
from kvrouter.http.server.limits import Limits
from kvrouter_store.system_errors import cannot_listen

if TYPE_CHECKING:
    import ssl

Handler = Callable[[Exchange], Awaitable[None]]
AtHead = Callable[[Exchange], None]

_BACKLOG = 4096
_SHUTDOWN_S = 5.0
_LAST_WORDS_S = 1.0
"""For clients to take the end of an answer that was cut off."""
_ABORT_S = 5.0


class HttpServer:
    """Serves each request with one task of `handler(exchange)`.

    The handler's task is cancelled as soon as its client leaves, whether it awaits an engine or
    writes. A handler that raises becomes a 500, or a cut-off answer when it had started. Requests
    pipelined on one connection are served one after another.

    Where there is `at_head`, it is called with each request when its head is there and its turn
    has come, after the read in which its head ended. If it answers, what is left of the body is not
    read, and the connection closes.

    A server leaves in three steps: `drain`, `stop_listening`, `close`.

    Attributes:
        handler: answers each request.
        limits: of each connection, and of all.
        at_head: sees requests before their bodies come, or None.
        half_in_bytes: what has come of bodies that are not whole yet.
        date_line: the `date` header line of the last second that one was asked for.
        draining: whether each answer is the last of its connection.
    """

    def __init__(
        self, handler: Handler, limits: Limits | None = None, at_head: AtHead | None = None
    ) -> None:
        self.handler = handler
        self.limits = limits or Limits()
        self.at_head = at_head
        self.half_in_bytes = 0
        self.date_line = b""
        self.draining = False
        self._date_s = 0
        self._stopped = False
        self._connections: set[Connection] = set()
        self._listening: list[asyncio.Server] = []
        self._watch: DeadlineTimer | None = None
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def connections(self) -> int:
        """How many connections are open or still have a handler that is ending."""
        return len(self._connections)

    @property
    def port(self) -> int:
        """The port it listens on; raises RuntimeError when it does not listen."""
        sockets = [each for server in self._listening for each in server.sockets]
        if not sockets:
            raise RuntimeError("the server does not listen")
        return int(sockets[0].getsockname()[1])

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Accept connections on `host` and `port` (0: any free one); returns the port.

        Args:
            host: address, or a name that stands for some.
            port: TCP port.
            tls: what those who connect are shown; None: the port is plain.

        Raises:
            OSError: the address cannot be bound.
        """
        self._watch = DeadlineTimer(asyncio.get_running_loop(), self.limits.tick_s)
        try:
            self._listening = [await self._accept(tls, host=host, port=port)]
        except OSError as error:
            raise cannot_listen(host, port, error) from None
        return self.port

    async def renew(self, tls: ssl.SSLContext) -> None:
        """Show `tls` to those who connect from now on; nobody is refused meanwhile.

        Connections that are there stay as they are. Nothing of the context before is used any
        more: neither its certificate nor the sessions that it would have resumed.

        Raises:
            OSError: there are no descriptors left; then all stays as it was.
        """
        before, made = self._listening, list[asyncio.Server]()
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
        """Answer every request from now on with `connection: close`, and go on listening.

        Clients then connect again, where a load balancer sends them. Idempotent.
        """
        self.draining = True
        for connection in self._connections:
            connection.drain()

    def stop_listening(self) -> None:
        """Accept no connection any more, and close idle ones. Idempotent.

        Requests that have come, or are half in, are still answered.
        """
        self.drain()
        self._stopped = True
        for server in self._listening:
            server.close()
        for connection in list(self._connections):
            connection.close_idle()

    async def emptied(self) -> None:
        """Return when no connection is left."""
        await self._empty.wait()

    async def close(self, grace_s: float = 0.0) -> None:
        """Stop listening; answers under way get `grace_s` to end, then are cut off.

        A handler that is cut off is cancelled while its client is still there: what it writes then
        is sent, within a second.
        """
        self.stop_listening()
        await self._wait_empty(grace_s)
        for connection in list(self._connections):
            connection.cut_off()
        await self._wait_empty(_LAST_WORDS_S)
        for connection in list(self._connections):
            connection.abort()
        await self._wait_empty(_ABORT_S)
        if self._watch is not None:
            self._watch.close()

    def joined(self, connection: Connection) -> bool:
        """A connection was made: false when there are too many, or the server has stopped."""
        if self._stopped or len(self._connections) >= self.limits.connections:
            return False
        self._connections.add(connection)
        self._empty.clear()
        if self._watch is not None:
            self._watch.add(connection)
        return True

    def left(self, connection: Connection) -> None:
        """A connection and its handler are both over."""
        self._connections.discard(connection)
        if self._watch is not None:
            self._watch.discard(connection)
        if not self._connections:
            self._empty.set()

    def date(self) -> bytes:
        """The `date` header line of RFC 9110 6.6.1, made anew at most once per second."""
        now = int(time.time())
        if now != self._date_s:
            self._date_s = now
            self.date_line = f"date: {formatdate(now, usegmt=True)}\r\n".encode("ascii")
        return self.date_line

    async def _accept(self, tls: ssl.SSLContext | None, **where: Any) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        if tls is not None:
            where |= {
                "ssl": tls,
                "ssl_handshake_timeout": self.limits.handshake_timeout_s,
                "ssl_shutdown_timeout": _SHUTDOWN_S,
            }
        return await loop.create_server(lambda: Connection(self, loop), backlog=_BACKLOG, **where)

    async def _wait_empty(self, deadline_s: float) -> None:
        if not self._connections or deadline_s <= 0:
            await asyncio.sleep(0)
            return
        try:
            async with asyncio.timeout(deadline_s):
                await self._empty.wait()
        except TimeoutError:
            return
