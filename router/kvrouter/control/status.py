"""Endpoints about the router itself: health, readiness, version, models, metrics, OpenAPI."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import orjson

from kvrouter import __version__
from kvrouter.access.callers import caller_of
from kvrouter.control.openapi import document
from kvrouter.engines.engine import Role
from kvrouter.engines.models import model_cards
from kvrouter.errors import model_not_found
from kvrouter.http.server.respond import HttpRequest, HttpResponse, as_json
from kvrouter.telemetry.metrics import CONTENT_TYPE, Metrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrouter.engines.model_settings import Aliases
    from kvrouter.engines.pool import EnginePool
    from kvrouter.http.server.respond import Row

_NOT_READY: Final = frozenset({"starting", "unavailable", "draining"})
"""States that /health answers with 503."""
NAMED: Final = 4
"""Engines that a sentence names."""


@dataclass(eq=False)
class Status:
    """The endpoints; none of them asks an engine.

    Attributes:
        admin, keys, apart: for `document`.
    """

    pool: EnginePool
    metrics: Metrics
    asked: Callable[[], bool]  # whether every engine has been probed once
    store_lacks: Callable[[], list[str]]  # sentences about nodes that are not connected
    draining: Callable[[], bool]  # whether the router is about to stop
    aliases: Callable[[], Aliases]  # other names for models
    admin: bool = False
    keys: Callable[[], bool] = lambda: False
    apart: bool = False

    def __post_init__(self) -> None:
        self._started_s = int(time.time())
        self._documents: dict[bool, bytes] = {}

    def rows(self) -> list[Row]:
        """The endpoints."""
        return [
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/", self.model),
            ("GET", "/health", self.health),
            ("GET", "/ready", self.health),
            ("GET", "/ping", self.ping),
            ("POST", "/ping", self.ping),
            ("GET", "/healthcheck", self.healthcheck),
            ("GET", "/live", self.live),
            ("GET", "/version", self.version),
            ("GET", "/metrics", self.metrics_page),
            ("GET", "/openapi.json", self.api),
        ]

    def models(self, request: HttpRequest) -> HttpResponse:
        """Models of the available engines, and their aliases."""
        return as_json(200, {"object": "list", "data": list(self._cards(request).values())})

    def model(self, request: HttpRequest) -> HttpResponse:
        """The model that the path names."""
        name = unquote(request.path.removeprefix("/v1/models/"))
        cards = self._cards(request)
        if name not in cards:
            raise model_not_found(name)
        return as_json(200, cards[name])

    def _cards(self, request: HttpRequest) -> dict[str, dict[str, Any]]:
        """Available models that the caller may use, and their aliases."""
        cards = model_cards(self.pool.all(), self._started_s, self.aliases())
        caller = caller_of(request)
        if caller is None:
            return cards
        return {name: card for name, card in cards.items() if caller.allows(name)}

    def health(self, _: HttpRequest) -> HttpResponse:
        """200 while load balancers should send requests, also if prefixes are not reused."""
        return _health_answer(*self.condition())

    def ping(self, _: HttpRequest) -> HttpResponse:
        """200 while the router serves requests, also while it drains."""
        return _health_answer(*self._fitness())

    def condition(self) -> tuple[str, list[str]]:
        """`status` of /health, and sentences about what is lacking."""
        if self.draining():
            return "draining", ["the router is about to stop"]
        return self._fitness()

    def _fitness(self) -> tuple[str, list[str]]:
        """The same without draining."""
        if not self.asked():
            return "starting", ["not every engine has been asked yet"]
        lacking, engines = [], self.pool.all()
        if not self.pool.engines(Role.DECODE):
            if all(e.draining or self.pool.down(e) for e in engines if e.role.serves(Role.DECODE)):
                return "unavailable", ["no decode engine is available"]
            if any(e.identity is None for e in engines):  # else the fleet only embeds
                lacking.append("no engine that generates text is available")
        if self.pool.has_role(Role.PREFILL) and not self.pool.engines(Role.PREFILL):
            lacking.append("no prefill engine is available: decode engines compute prompts")
        down = [e.address for e in engines if not e.draining and self.pool.down(e)]
        if down:
            named = ", ".join([*down[:NAMED], *["..."][: len(down) - NAMED]])
            verb = "is" if len(down) == 1 else "are"
            lacking.append(f"{len(down)} of {len(engines)} engines {verb} down: {named}")
        lacking += self.store_lacks()
        return "degraded" if lacking else "ok", lacking

    def healthcheck(self, _: HttpRequest) -> HttpResponse:
        """Numbers of engines, as vLLM's toy proxy reports them; 503 as /health."""
        prefill, decode = self.pool.engines(Role.PREFILL), self.pool.engines(Role.DECODE)
        counts = {"prefill_instances": len(prefill), "decode_instances": len(decode)}
        status = "draining" if self.draining() else "ok" if decode else "unavailable"
        return as_json(200 if status == "ok" else 503, {"status": status, **counts})

    def live(self, _: HttpRequest) -> HttpResponse:
        """200 while the process answers."""
        return as_json(200, {"status": "ok"})

    def version(self, _: HttpRequest) -> HttpResponse:
        """The router's version, in the form of vLLM's endpoint."""
        return as_json(200, {"version": __version__, "server": "kvrouter"})

    def metrics_page(self, _: HttpRequest) -> HttpResponse:
        """Metrics for Prometheus."""
        return HttpResponse(200, self.metrics.page(), CONTENT_TYPE)

    def api(self, _: HttpRequest) -> HttpResponse:
        """The OpenAPI document."""
        keys = self.keys()
        if keys not in self._documents:
            made = document(__version__, admin=self.admin, keys=keys, apart=self.apart)
            self._documents[keys] = orjson.dumps(made)
        return HttpResponse(200, self._documents[keys])


def _health_answer(status: str, lacking: list[str]) -> HttpResponse:
    if status in _NOT_READY:
        body = {"status": status, "reason": lacking[0]}
        return as_json(503, body, (("retry-after", "1"),))
    return as_json(200, {"status": status, "lacking": lacking})
