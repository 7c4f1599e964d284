"""The gate before the router's endpoints: whose request it is, and whether it may begin.

It takes the caller's Authorization off the request, so that nothing behind it can pass the key on,
log it or count by it. Endpoints that it leaves open see their requests as they came.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvrouter._native import QuickGate, find_bearer
from kvrouter.errors import ApiError
from kvrouter.log import Line
from kvrouter.metrics import Reading
from kvrouter.passage import RequestIds

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator

    from kvrouter.access.caller import KeyRing
    from kvrouter.http.exchange import Exchange
    from kvrouter.http.server import Handler
    from kvrouter.log import RequestLog
    from kvrouter.metrics import Metrics, Row

_OPEN: Final = frozenset(
    {
        "/health",
        "/ready",
        "/ping",
        "/live",
        "/version",
        "/metrics",
        "/healthcheck",
        "/openapi.json",
        "/workers",
    }
)
"""What vLLM leaves open, and what has a token of its own."""
_OPEN_BELOW: Final = "/workers/"
GUARDED: Final = "/v1/"
"""What begins so is never open."""
_MISSING: Final = "This needs an API key, as Authorization: Bearer KEY."
_WRONG: Final = "The API key is not one of this router's."


def is_open(path: str) -> bool:
    """Whether an endpoint asks for no key."""
    return not path.startswith(GUARDED) and (path in _OPEN or path.startswith(_OPEN_BELOW))


class Gate:
    """Lets requests with a good key through to `handler`.

    Args:
        ring: the keys.
        handler: of all requests.
        metrics: counts those that are refused.
        log: takes a line for each that is refused, or None.
    """

    def __init__(
        self, ring: KeyRing, handler: Handler, metrics: Metrics, log: RequestLog | None
    ) -> None:
        self._ring = ring
        self._handler = handler
        self._metrics = metrics
        self._log = log
        self._ids = RequestIds()
        self._admit = QuickGate(GUARDED).admit

    @property
    def handler(self) -> Handler:
        """What answers requests: this gate, or nothing but the handler while there are no keys."""
        return self.handle if len(self._ring) else self._handler

    def handle(self, exchange: Exchange) -> Awaitable[None]:
        """What answers `exchange`, to be awaited at once."""
        if self._admit(exchange, self._ring.by_digest) or is_open(exchange.path):
            return self._handler(exchange)
        given = exchange.headers.pop("authorization", "")
        caller = exchange.caller = find_bearer(self._ring.by_digest, given)
        if caller is None:
            self._ring.unknown += 1
            wrong = ApiError(
                401,
                _WRONG if given else _MISSING,
                kind="invalid_request_error",
                code="invalid_api_key",
            )
            return self._refuse(exchange, wrong)
        if exchange.method != "POST":
            return self._handler(exchange)
        if caller.limited:
            try:
                caller.begin()
            except ApiError as error:
                return self._refuse(exchange, error)
        caller.requests += 1
        exchange.counted_by = caller
        return self._handler(exchange)

    def readings(self) -> Iterator[Reading]:
        """What is known of the callers, for Prometheus; nothing is exposed of keys themselves."""
        ring = self._ring
        yield Reading(
            "kvrouter:key_requests_running",
            "Requests of a key under way.",
            lambda: [((caller.name,), float(caller.running)) for caller in ring.all()],
            ["key"],
        )
        yield Reading(
            "kvrouter:key_requests",
            "Requests of a key that have begun.",
            lambda: [((caller.name,), float(caller.requests)) for caller in ring.all()],
            ["key"],
            grows=True,
        )
        yield Reading(
            "kvrouter:key_tokens",
            "Tokens of a key's prompts and answers, as they count for its rate.",
            lambda: [((caller.name,), float(caller.tokens)) for caller in ring.all()],
            ["key"],
            grows=True,
        )
        yield Reading(
            "kvrouter:key_refused",
            "Requests refused: without a good key (unknown), for another model than the key is "
            "for (model), beyond its rates (requests, tokens) or requests at a time (concurrency).",
            self._refused,
            ["key", "reason"],
            grows=True,
        )

    async def _refuse(self, exchange: Exchange, error: ApiError) -> None:
        request_id = self._ids.of(exchange.headers)
        challenge = [("www-authenticate", "Bearer")] if error.status == 401 else []
        headers = (*error.headers(), *challenge, ("x-request-id", request_id))
        exchange.respond(error.status, error.body(), headers=headers)
        self._metrics.errors[str(error.status)] += 1
        if self._log is None:
            return
        caller = exchange.caller
        line = Line(
            request_id=request_id,
            status=error.status,
            outcome="error",
            path=exchange.path[:200],
            key=caller.name if caller is not None else None,
            client=exchange.peer,
            error=error.message,
        )
        self._log.write(line)

    def _refused(self) -> list[Row]:
        rows: list[Row] = [(("", "unknown"), float(self._ring.unknown))] if len(self._ring) else []
        for caller in self._ring.all():
            rows += [((caller.name, why), float(n)) for why, n in caller.refused.items()]
        return rows
