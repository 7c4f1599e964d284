"""HTTP/1.1 server: listens, bounds and drains connections. Knows nothing of OpenAI or engines."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable
from email.utils import formatdate
from typing import TYPE_CHECKING, Any

from kvrouter.http.connection import Connection
from kvrouter.http.exchange import Exchange
from kvrouter.http.limits import Limits
from kvrouter.http.watch import Watch

if TYPE_CHECKING:
    import ssl

Handler = Callable[[Exchange], Awaitable[None]]

_BACKLOG = 4096
_SHUTDOWN_S = 5.0


class HttpServer:
    """Serves each request with one task of `handler(exchange)`.

    The handler's task is cancelled as soon as its client leaves, whether it awaits an engine or
    writes. A handler that raises becomes a 500, or a cut-off answer when it had started. Requests
    pipelined on one connection are served one after another.
    """

    def __init__(self, handler: Handler, limits: Limits | None = None) -> None:
        self.handler = handler
        self.limits = limits or Limits()
        self.date_line = b""
        self.draining = False
        self._date_s = 0
        self._connections: set[Connection] = set()
        self._listening: list[asyncio.Server] = []
        self._watch: Watch | None = None
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
        self._watch = Watch(asyncio.get_running_loop(), self.limits.tick_s)
        self._listening = [await self._accept(tls, host=host, port=port)]
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

    async def close(self, grace_s: float = 0.0) -> None:
        """Stop listening; answers under way get `grace_s` to end, then are cut off."""
        self.draining = True
        for server in self._listening:
            server.close()
        for connection in list(self._connections):
            connection.drain()
        await self._wait_empty(grace_s)
        for connection in list(self._connections):
            connection.abort()
        await self._wait_empty(5.0)
        if self._watch is not None:
            self._watch.close()

    def joined(self, connection: Connection) -> bool:
        """A connection was made: false when there are too many."""
        if self.draining or len(self._connections) >= self.limits.connections:
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
