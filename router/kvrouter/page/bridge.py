"""Lets Quart answer with the router's own handlers: they see an exchange, whoever serves it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from quart import Response, request
from werkzeug.datastructures import Headers

from kvrouter.http.exchange import Exchange
from kvrouter.http.head import JSON

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable

    from kvrouter.http.head import Headers as Lines

METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class _NoChannel:
    """There is no connection under a captured exchange: nothing of it is ever touched."""

    transport: asyncio.Transport

    def date_line(self) -> bytes:
        return b""

    async def writable(self) -> None:
        return

    def paused(self) -> bool:
        return False


class Captured(Exchange):
    """An exchange whose whole answer is kept. Handlers that stream cannot be served by it."""

    __slots__ = ("answer",)

    def __init__(
        self, *, method: str, path: str, query: str, headers: dict[str, str], body: bytes, peer: str
    ) -> None:
        super().__init__(
            _NoChannel(),
            method=method,
            path=path,
            query=query,
            headers=headers,
            body=body,
            peer=peer,
            keep_alive=True,
            http_1_1=True,
        )
        self.answer: tuple[int, bytes, list[tuple[str, str]]] | None = None

    def respond(
        self,
        status: int,
        body: bytes = b"",
        *,
        content_type: str = JSON,
        headers: Lines = (),
        fields: bytes = b"",
    ) -> None:
        """Keep the answer."""
        lines = (line.partition(": ") for line in fields.decode("latin-1").splitlines())
        more = [(name, value) for name, _, value in lines]
        self.status, self.ended = status, True
        self.answer = status, body, [("content-type", content_type), *headers, *more]

    def start(
        self, status: int, headers: Lines = (), *, fields: bytes = b"", hold: bool = False
    ) -> None:
        """Never called: nothing streams here."""
        raise NotImplementedError


async def answer_with(handle: Callable[[Exchange], Awaitable[None]]) -> Response:
    """What `handle` answers to the request that Quart serves now."""
    raw_path = request.scope.get("raw_path") or request.path.encode()
    headers: dict[str, str] = {}
    for name, value in request.headers.items():
        key = name.lower()
        headers[key] = f"{headers[key]}, {value}" if key in headers else value
    body: bytes = await request.get_data(as_text=False)  # type: ignore[assignment]
    exchange = Captured(
        method=request.method,
        path=raw_path.decode("latin-1").partition("?")[0],
        query=request.query_string.decode("latin-1"),
        headers=headers,
        body=body,
        peer=request.remote_addr or "",
    )
    await handle(exchange)
    if exchange.answer is None:
        raise RuntimeError(f"{exchange.path} was not answered")
    status, content, answered = exchange.answer
    return Response(content, status=status, headers=Headers(answered))
