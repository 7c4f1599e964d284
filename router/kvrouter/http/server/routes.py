"""Finds what answers a path and a method."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Generic, TypeVar

from kvrouter.errors import ApiError
from kvrouter.http.server.exchange import BODILESS
from kvrouter.http.server.respond import HttpRequest, answer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable

    from kvrouter.http.server.exchange import Exchange
    from kvrouter.http.server.listener import Handler
    from kvrouter.http.server.respond import Respond, Row

    Route = tuple[str, str, Handler]  # method, path and handler

T = TypeVar("T")


class RouteTable(Generic[T]):
    """A value for each path and method.

    A path that ends in "/", but not "/" itself, stands for all paths below it that have no nearer
    one. Without a GET it does not say which of them there are.
    """

    def __init__(self, rows: Iterable[tuple[str, str, T]]) -> None:
        self._paths: dict[str, dict[str, T]] = {}
        self.add(rows)

    def add(self, rows: Iterable[tuple[str, str, T]]) -> None:
        """More rows: method, path and what is there."""
        for method, path, found in rows:
            self._paths.setdefault(path, {})[method] = found

    def find(self, method: str, path: str) -> T:
        """What is there; for a HEAD what is there for a GET.

        ApiError: 404: there is no such path; 405, with `Allow`: it has not this method.
        """
        methods = self._paths.get(path) or self._below(path)
        if methods is None:
            raise _not_here(path)
        found = methods.get("GET" if method == "HEAD" and method not in methods else method)
        if found is None and path not in self._paths and "GET" not in methods:
            raise _not_here(path)
        if found is None:
            raise _not_allowed(method, sorted(methods))
        return found

    def _below(self, path: str) -> dict[str, T] | None:
        prefixes = (each for each in self._paths if each.endswith("/") and each != "/")
        longest = max(filter(path.startswith, prefixes), key=len, default="")
        return self._paths.get(longest)


class Routes(RouteTable["Handler"]):
    """Handlers of an `HttpServer`. A HEAD is answered as a GET; the exchange sends no body."""

    def handle(self, exchange: Exchange) -> Awaitable[None]:
        """Answer `exchange`; the result must be awaited."""
        try:
            handler = self.find(exchange.method, exchange.path)
        except ApiError as error:
            return _refuse(exchange, error)
        return handler(exchange)


def on_path(rows: Iterable[Row]) -> Respond:
    """A function that answers each request as its row does."""
    table = RouteTable(rows)
    return lambda request: table.find(request.method, request.path)(request)


def on_exchange(respond: Respond) -> Handler:
    """A handler that answers as `respond` does, one request in each turn of the loop.

    Some pages take milliseconds, and strangers may ask for many at once.
    """
    turn = asyncio.Lock()

    async def handle(exchange: Exchange) -> None:
        async with turn:
            show(exchange)
            await asyncio.sleep(0)

    def show(exchange: Exchange) -> None:
        asked = HttpRequest(
            exchange.method,
            exchange.path,
            exchange.query,
            exchange.headers,
            exchange.body,
            exchange.principal,
        )
        answered = answer(respond, asked)
        if answered.status in BODILESS:
            exchange.start(answered.status, answered.headers)
            return exchange.end()
        exchange.respond(
            answered.status,
            answered.body,
            content_type=answered.content_type,
            headers=answered.headers,
        )

    return handle


async def _refuse(exchange: Exchange, error: ApiError) -> None:
    exchange.respond(error.status, error.body(exchange.path), headers=error.headers())


def _not_here(path: str) -> ApiError:
    return ApiError(404, f"There is no {path[:200]} here.")


def _not_allowed(method: str, allowed: list[str]) -> ApiError:
    message = f"{method} is not allowed here; use {' or '.join(allowed)}."
    return ApiError(405, message, more_headers=(("allow", ", ".join(allowed)),))
