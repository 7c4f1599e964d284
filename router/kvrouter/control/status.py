"""Endpoints about the router itself: health, readiness, version, models, metrics, OpenAPI."""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import orjson
import yaml

from kvrouter import __version__
from kvrouter.access.callers import caller_of
from kvrouter.access.gate import is_open
from kvrouter.engines.engine import Role
from kvrouter.engines.families.parameter_table import Served
from kvrouter.engines.families.parameters import VLLM
from kvrouter.engines.models import model_cards
from kvrouter.errors import model_not_found
from kvrouter.http.server.respond import HttpRequest, HttpResponse, as_json
from kvrouter.openai.endpoints import ENDPOINTS
from kvrouter.telemetry.metrics import CONTENT_TYPE, Metrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrouter.engines.model_settings import Aliases
    from kvrouter.engines.pool import EnginePool
    from kvrouter.http.server.respond import Row
    from kvrouter.openai.request import Kind

_NOT_READY: Final = frozenset({"starting", "unavailable", "draining"})
"""States that /health answers with 503."""
NAMED: Final = 4  # engines that a sentence names
Json = dict[str, Any]
_INTEGER: Final[Json] = {"type": ["integer", "null"]}
_IDS: Final[Json] = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_TEXTS: Final[Json] = {"type": "array", "items": {"type": "string"}}
_LISTS: Final[Json] = {"type": "array", "items": _IDS}
READ: Final[dict[str, Json]] = {
    "model": {"type": ["string", "null"]},
    "prompt": {"oneOf": [{"type": "string", "minLength": 1}, _TEXTS, _IDS, _LISTS]},
    "messages": {"type": "array", "items": {"type": "object"}},
    "stream": {"type": ["boolean", "null"]},
    "stream_options": {"type": ["object", "null"]},
    "max_tokens": {"type": ["integer", "null"], "minimum": 1},
    "max_completion_tokens": {"type": ["integer", "null"], "minimum": 1},
    "min_tokens": _INTEGER,
    "n": {"type": ["integer", "null"], "minimum": 1},
    "best_of": _INTEGER,
    "cache_salt": {"type": ["string", "null"]},
    "priority": _INTEGER,
}
"""Schemas of the members that the router itself reads; engines know those of the others."""
_ERRORS: Final = (400, 404, 405, 408, 413, 415, 429, 431, 501, 502, 503, 504)
"""Errors of requests that engines answer."""
_GENERATION: Final[tuple[tuple[str, Kind, str, str], ...]] = (
    ("/v1/completions", "completion", "prompt", "Complete a prompt."),
    ("/v1/chat/completions", "chat", "messages", "Answer a conversation."),
)


@dataclass(eq=False)
class Status:
    """The endpoints; none of them asks an engine."""

    pool: EnginePool
    metrics: Metrics
    asked: Callable[[], bool]  # whether every engine has been probed once
    store_lacks: Callable[[], list[str]]  # sentences about nodes that are not connected
    draining: Callable[[], bool]  # whether the router is about to stop
    aliases: Callable[[], Aliases]  # other names for models
    admin: bool = False  # for `document`, as the next two
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


def document(version: str, *, admin: bool = False, keys: bool = False, apart: bool = False) -> Json:
    """The document as a JSON object: with the admin API, API keys, or a control port (`apart`).

    Its fixed part is `openapi.yaml`. Engines take more parameters, and check those that the router
    does not read.
    """
    found: Json = yaml.safe_load((files("kvrouter.control") / "openapi.yaml").read_bytes())
    found["info"]["version"] = version
    paths: dict[str, Json] = found["paths"]
    if apart:
        del paths["/metrics"]
    if apart or not admin:
        del paths["/workers"], paths["/workers/{worker}"]
    for path, kind, needed, about in _GENERATION:
        paths[path] = {"post": _posted(about, _members(kind), needed)}
    for endpoint in ENDPOINTS:
        members = {name: {"examples": [value]} for name, value in endpoint.members.items()}
        schema = {"model": READ["model"], **members}
        operation = _posted(endpoint.about, schema, *endpoint.members)
        if endpoint.method == "GET":
            del operation["requestBody"]
            operation["parameters"] = [{"name": "model", "in": "query", "schema": READ["model"]}]
        paths[endpoint.path] = {endpoint.method.lower(): operation}
    if keys:
        found["paths"] = {
            path: methods if is_open(path) else _with_keys(methods)
            for path, methods in paths.items()
        }
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return found


def _with_keys(methods: Json) -> Json:
    """The operations of a path, marked as those that need a key."""
    return {
        method: {
            **operation,
            "security": [{"key": []}],
            "responses": {**operation["responses"], **_errors(401)},
        }
        for method, operation in methods.items()
    }


def _members(kind: Kind) -> Json:
    members: Json = {}
    for name, row in VLLM.rows.items():
        if kind not in row.kinds:
            continue
        schema = dict(READ.get(name, {}))
        if row.served is not Served.SPLIT:
            condition = row.when.text or "where given"
            schema["description"] = f"{row.served.value} {condition}"
        members[name] = schema
    return members


def _posted(about: str, members: Json, *needed: str) -> Json:
    schema = {"type": "object", "properties": members, "required": list(needed)}
    content = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}}
    return {
        "summary": about,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": {"description": about, "content": content}, **_errors(*_ERRORS)},
    }


def _errors(*statuses: int) -> Json:
    return {str(status): {"$ref": f"#/components/responses/{status}"} for status in statuses}
