"""Asks one engine over kept connections. Retries nothing but a connection that had gone stale."""

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from kvrouter.http.client.connection import ClientConnection
from kvrouter.http.client.response import EngineResponse, UpstreamError
from kvrouter.http.deadlines import DeadlineTimer
from kvrouter.http.failure import Failure

__all__ = ["Deadlines", "EngineResponse", "Links", "Upstream", "UpstreamError"]

_CUT = "the engine was removed"
_KEEP_S = 4.0  # uvicorn, which vLLM's server is, closes an idle connection after 5 s


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds that an engine may take, per request."""

    connect_s: float = 5.0
    first_byte_s: float = 600.0
    idle_s: float = 120.0


class Links:
    """All connections to one engine, also those in use of upstreams that are closed."""

    def __init__(self) -> None:
        self._links: set[ClientConnection] = set()
        self._cut = False

    def add(self, link: ClientConnection) -> bool:
        """A connection was made; False where it is cut off already."""
        if self._cut:
            link.abort()
            return False
        self._links.add(link)
        return True

    def discard(self, link: ClientConnection) -> None:
        """A connection is gone."""
        self._links.discard(link)

    def cut(self) -> None:
        """End all of them, and each that is being made, for good: what is under way breaks off."""
        self._cut = True
        for link in list(self._links):
            link.cut(_CUT)


class Upstream:
    """Connections to one engine, kept between requests.

    Owned by whoever made it, who must `close` it. `send` may be called concurrently; each call
    has a connection of its own. The number of connections is bounded by the requests under way.

    Args:
        host: name or address.
        port: TCP port.
        watch: checks the deadlines; shared by all upstreams of one loop.
        idle_links: connections kept at most while nothing is asked on them.
        links: of the engine, shared by all upstreams that ever lead to it; None: its own.
        tls: whom to trust; its certificate must name `host`. None: connections are plain.

    Attributes:
        links: all its connections, in use or not.
    """

    def __init__(
        self,
        host: str,
        port: int,
        watch: DeadlineTimer,
        *,
        idle_links: int = 1024,
        links: Links | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._host = host
        self._port = port
        self._watch = watch
        self._idle_links = idle_links
        self._idle: list[ClientConnection] = []
        self.links = links or Links()
        self._tls = tls
        self._closed = False

    @property
    def idle(self) -> int:
        """Connections kept open that nobody uses."""
        return len(self._idle)

    async def send(
        self,
        method: str,
        path: str,
        *,
        fields: bytes = b"",
        body: Sequence[bytes] = (),
        deadlines: Deadlines,
    ) -> EngineResponse:
        """Send a request and return its answer when its head is there.

        Args:
            method: HTTP method.
            path: path and query.
            fields: header lines of this request, each with its line end; not checked.
            body: pieces of the body, sent one after another without being joined.
            deadlines: for connecting and for the first byte.

        Raises:
            UpstreamError: the engine could not be reached or gave no answer in time. A cancelled
                call closes its connection.
        """
        head = b"%bcontent-length: %d\r\n%b\r\n" % (
            _request_head(method, path, self._host, self._port),
            sum(map(len, body)),
            fields,
        )
        link = self._take()
        while True:
            fresh = link is None
            if link is None:
                link = await self._connect(deadlines)
            answer = link.ask((head, *body), deadlines.first_byte_s)
            try:
                await answer.head()
            except UpstreamError as error:
                if fresh or not error.stale:
                    raise
                link = None
            except BaseException:
                answer.close()
                raise
            else:
                return answer

    def close(self) -> None:
        """Close what is idle; connections in use close when their answers end."""
        self._closed = True
        idle, self._idle = self._idle, []
        for link in idle:
            link.abort()

    def _take(self) -> ClientConnection | None:
        while self._idle:
            link = self._idle.pop()
            if link.usable():
                return link
        return None

    async def _connect(self, deadlines: Deadlines) -> ClientConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(deadlines.connect_s):
                _, link = await loop.create_connection(
                    lambda: ClientConnection(loop, free=self._free, gone=self._gone),
                    self._host,
                    self._port,
                    ssl=self._tls,
                )
        except TimeoutError:
            raise UpstreamError(
                Failure.CONNECT, f"no connection within {deadlines.connect_s:g} s"
            ) from None
        except ConnectionRefusedError:
            raise UpstreamError(Failure.REFUSED, "the connection was refused") from None
        except OSError as error:
            raise UpstreamError(Failure.CONNECT, f"no connection: {error.strerror}") from None
        if not self.links.add(link):
            raise UpstreamError(Failure.REFUSED, _CUT)
        self._watch.add(link)
        return link

    def _free(self, link: ClientConnection) -> None:
        if self._closed or len(self._idle) >= self._idle_links:
            link.abort()
            return
        link.rest(_KEEP_S)
        self._idle.append(link)

    def _gone(self, link: ClientConnection) -> None:
        self._watch.discard(link)
        self.links.discard(link)
        if link in self._idle:
            self._idle.remove(link)


@lru_cache(maxsize=4096)
def _request_head(method: str, path: str, host: str, port: int) -> bytes:
    shown = f"[{host}]" if ":" in host else host
    return (
        f"{method} {path} HTTP/1.1\r\nhost: {shown}:{port}\r\naccept-encoding: identity\r\n"
    ).encode("latin-1")
