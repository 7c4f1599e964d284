"""Authentication in front of the router's endpoints.

The gate checks the key when the head of a request has arrived, before the server reads the body. It
removes the caller's key, so that no later code can forward or log the key. Requests of
open endpoints pass unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvrouter.access.callers import Caller, KeyRing, UsedTokens, caller_of
from kvrouter.errors import ApiError
from kvrouter.http.request_id import RequestIds
from kvrouter.telemetry.by_model import MODEL
from kvrouter.telemetry.request_log import RequestLine, RequestLog
from kvrouter.telemetry.series import Reading, Row

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from kvrouter.http.server.exchange import Exchange
    from kvrouter.http.server.listener import Handler
    from kvrouter.telemetry.metrics import Metrics

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
"""Paths that vLLM leaves open, and those with a token of their own."""
_OPEN_BELOW: Final = "/workers/"
GUARDED: Final = "/v1/"  # no path below this is open
_OPEN_BODY_BYTES: Final = 64 * 1024
"""Largest body that an open endpoint takes from a client without a key."""
_MISSING: Final = "This needs an API key, as Authorization: Bearer KEY."
_WRONG: Final = "The API key is not one of this router's."


def is_open(path: str) -> bool:
    """Whether an endpoint needs no key."""
    return not path.startswith(GUARDED) and (path in _OPEN or path.startswith(_OPEN_BELOW))


def _is_large(headers: dict[str, str]) -> bool:
    """Whether a body is too large for an open endpoint, or of unknown length."""
    length = int(headers.get("content-length", "0"))
    return length > _OPEN_BODY_BYTES or "transfer-encoding" in headers


@dataclass(eq=False, repr=False)
class Gate:
    """Passes requests with a valid key to `handler`; without any keys, all requests.

    The server calls `at_head` for each request, then `handle`.
    """

    ring: KeyRing  # the keys
    handler: Handler  # of all requests
    metrics: Metrics  # counts refused requests, and gets the metrics of callers
    log: RequestLog | None  # takes a line for each refused request, or None

    def __post_init__(self) -> None:
        self._ids = RequestIds()
        for reading in self._readings():
            self.metrics.add(reading)

    def at_head(self, exchange: Exchange) -> None:
        """Find the caller before the body arrives; answer a request without a valid key."""
        if key := exchange.headers.pop("x-api-key", ""):  # of Anthropic's clients
            exchange.headers.setdefault("authorization", f"Bearer {key}")
        if not len(self.ring):
            return
        if is_open(exchange.path):
            if _is_large(exchange.headers):
                self._refuse(exchange, ApiError(413, f"The body is too large for {exchange.path}."))
            return
        given = exchange.headers.pop("authorization", "")
        exchange.principal = self.ring.find(given)
        if exchange.principal is None:
            self.ring.unknown += 1
            wrong = ApiError(
                401,
                _WRONG if given else _MISSING,
                kind="invalid_request_error",
                code="invalid_api_key",
            )
            self._refuse(exchange, wrong)

    def handle(self, exchange: Exchange) -> Awaitable[None]:
        """Answer `exchange`, for which `at_head` was called; the result must be awaited at once."""
        caller = caller_of(exchange)
        if caller is None or exchange.method != "POST":
            return self.handler(exchange)
        return self._counted(exchange, caller)

    async def _counted(self, exchange: Exchange, caller: Caller) -> None:
        if caller.limited:
            try:
                caller.begin()
            except ApiError as error:
                self._refuse(exchange, error)
                return
        caller.requests += 1
        try:
            await self.handler(exchange)
        finally:
            caller.ended += 1

    def _readings(self) -> Iterator[Reading]:
        """Metrics of the callers. They contain names, never keys."""
        ring = self.ring
        yield Reading(
            "kvrouter:key_requests_running",
            "Requests of a key in flight.",
            lambda: ((caller.name, caller.running) for caller in ring.all()),
            ["key"],
        )
        yield Reading(
            "kvrouter:key_requests",
            "Requests of a key that were admitted.",
            lambda: ((caller.name, caller.requests) for caller in ring.all()),
            ["key"],
            grows=True,
        )
        yield Reading(
            "kvrouter:key_tokens",
            "Tokens of a key's prompts and answers, as its rate counts them.",
            lambda: ((caller.name, caller.tokens) for caller in ring.all()),
            ["key"],
            grows=True,
        )
        yield self._used(
            "key_prompt_tokens", "Prompt tokens of a key's answers.", lambda used: used.prompt
        )
        yield self._used(
            "key_cached_tokens",
            "Those of them that engines did not compute, as far as engines say.",
            lambda used: used.cached,
        )
        yield self._used(
            "key_generation_tokens",
            "Tokens that a key's clients got, also of answers that broke off.",
            lambda used: used.generation,
        )
        yield Reading(
            "kvrouter:key_refused",
            "Refused requests by reason: no valid key (unknown), a model that the key must not "
            "use (model), its rates (requests, tokens), its requests in flight (concurrency).",
            self._refused,
            ["key", "reason"],
            grows=True,
        )

    def _used(self, name: str, text: str, count: Callable[[UsedTokens], int]) -> Reading:
        def rows() -> Iterator[Row]:
            labels = [one.label for one in self.metrics.models if one.label]
            for caller in self.ring.all():  # what may be used begins with 0: rates need that
                zeros = {label: UsedTokens() for label in labels if caller.allows(label)}
                for model, used in {**zeros, **caller.used}.items():
                    yield (caller.name, model), count(used)

        return Reading(f"kvrouter:{name}", text, rows, ["key", MODEL], grows=True)

    def _refuse(self, exchange: Exchange, error: ApiError) -> None:
        request_id = self._ids.of(exchange.headers)
        headers = (*error.headers(), ("x-request-id", request_id))
        exchange.respond(error.status, error.body(exchange.path), headers=headers)
        self.metrics.errors[str(error.status), ""] += 1
        if self.log is None:
            return
        caller = caller_of(exchange)
        line = RequestLine(
            request_id=request_id,
            status=error.status,
            outcome="error",
            path=exchange.path[:200],
            key=caller.name if caller is not None else None,
            client=exchange.peer,
            error=error.message,
        )
        self.log.write(line)

    def _refused(self) -> list[Row]:
        rows: list[Row] = [(("", "unknown"), self.ring.unknown)] if len(self.ring) else []
        for caller in self.ring.all():
            rows += [((caller.name, why), n) for why, n in caller.refused.items()]
        return rows
