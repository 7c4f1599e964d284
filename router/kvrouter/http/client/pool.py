"""A pool of kept connections to one engine. Retries only after a connection that had gone stale."""

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from kvrouter.http.client.connection import ClientConnection
from kvrouter.http.client.open_connections import OpenConnections
from kvrouter.http.client.response import EngineResponse, UpstreamError
from kvrouter.http.deadlines import DeadlineTimer
from kvrouter.http.failure import Failure
from kvrouter_store.connection.keep_alive import keep_alive
from kvrouter_store.system_errors import is_ours

__all__ = ["ConnectionPool", "Deadlines", "EngineResponse", "OpenConnections", "UpstreamError"]

_KEEP_S = 4.0  # uvicorn, which vLLM's server is, closes an idle connection after 5 s


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds that an engine may take, per request."""

    connect_s: float = 5.0
    first_byte_s: float = 600.0
    idle_s: float = 120.0


@dataclass(eq=False)
class ConnectionPool:
    """Connections to one engine, kept between requests. Its owner must `close` it.

    Calls of `send` may run at the same time, each on its own connection: the requests in flight
    bound the number of connections.

    Attributes:
        open_connections: the engine's, shared by all pools that ever lead to it; else its own.
        tls: certificates to trust; the engine's must name `host`. None: connections are plain.
    """

    host: str  # name or address
    port: int  # TCP port
    timer: DeadlineTimer  # checks the deadlines
    max_idle: int = 1024  # idle connections that are kept
    open_connections: OpenConnections = field(default_factory=OpenConnections)
    tls: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        self._idle: list[ClientConnection] = []
        self._closed = False

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
        """Close idle connections; those in use close when their answers end."""
        self._closed = True
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.abort()

    def _take(self) -> ClientConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable():
                return connection
        return None

    async def _connect(self, deadlines: Deadlines) -> ClientConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(deadlines.connect_s):
                transport, connection = await loop.create_connection(
                    lambda: ClientConnection(loop, on_free=self._keep, on_gone=self._gone),
                    self.host,
                    self.port,
                    ssl=self.tls,
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
        if not self.open_connections.add(connection):
            raise UpstreamError(Failure.REFUSED, self.open_connections.cut_off)
        self.timer.add(connection)
        return connection

    def _keep(self, connection: ClientConnection) -> None:
        if self._closed or len(self._idle) >= self.max_idle:
            connection.abort()
            return
        connection.keep(_KEEP_S)
        self._idle.append(connection)

    def _gone(self, connection: ClientConnection) -> None:
        self.timer.discard(connection)
        self.open_connections.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)


@lru_cache(maxsize=4096)
def _request_head(method: str, path: str, host: str, port: int) -> bytes:
    shown = f"[{host}]" if ":" in host else host
    return (
        f"{method} {path} HTTP/1.1\r\nhost: {shown}:{port}\r\naccept-encoding: identity\r\n"
    ).encode("latin-1")
