"""Which handler answers which path. Knows paths and methods only."""

from collections.abc import Awaitable, Iterable

from kvrouter.errors import ApiError
from kvrouter.http.exchange import Exchange
from kvrouter.http.server import Handler


class Routes:
    """A handler by path and method: pass `Routes(...).handle` to `HttpServer`.

    A path that ends in "/" stands for every path below it that has no handler of its own.

    A path that is unknown is a 404, a method that it does not have is a 405 with `Allow`; a HEAD is
    answered as a GET whose body the exchange does not send.
    """

    def __init__(self, routes: Iterable[tuple[str, str, Handler]]) -> None:
        self._routes: dict[str, dict[str, Handler]] = {}
        for method, path, handler in routes:
            self._routes.setdefault(path, {})[method] = handler

    def handle(self, exchange: Exchange) -> Awaitable[None]:
        """What answers `exchange`, to be awaited."""
        methods = self._routes.get(exchange.path)
        if methods is None:
            methods = self._below(exchange.path)
        if methods is None:
            return _refuse(exchange, ApiError(404, f"There is no {exchange.path[:200]} here."))
        handler = methods.get(exchange.method)
        if handler is None and exchange.method == "HEAD":
            handler = methods.get("GET")
        if handler is None:
            return _refuse(exchange, _MethodError(exchange.method, sorted(methods)))
        return handler(exchange)

    def _below(self, path: str) -> dict[str, Handler] | None:
        found = (
            m
            for prefix, m in self._routes.items()
            if prefix.endswith("/") and path.startswith(prefix)
        )
        return next(found, None)


async def _refuse(exchange: Exchange, error: ApiError) -> None:
    exchange.respond(error.status, error.body(), headers=error.headers())


class _MethodError(ApiError):
    def __init__(self, method: str, allowed: list[str]) -> None:
        super().__init__(405, f"{method} is not allowed here; use {' or '.join(allowed)}.")
        self._allowed = allowed

    def headers(self) -> tuple[tuple[str, str], ...]:
        return (("allow", ", ".join(self._allowed)),)
