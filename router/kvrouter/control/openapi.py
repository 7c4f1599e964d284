"""The OpenAPI document of the router: its endpoints, and the parameters that it knows.

Made from the table of parameters and the list of passed-through endpoints. Engines take more
parameters, and check those that the router does not read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvrouter.access.gate import is_open
from kvrouter.engines.families.parameters import VLLM
from kvrouter.engines.families.table import Served
from kvrouter.openai.endpoints import ENDPOINTS

if TYPE_CHECKING:
    from kvrouter.openai.request import Kind

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
"""Schemas of the members that the router itself reads; of others engines know them."""

ERRORS: Final[dict[int, str]] = {
    400: "The request is wrong; `param` names the parameter.",
    401: "The API key, or for /workers the admin token, is missing or wrong.",
    403: "A page of another origin may not send this request.",
    404: "There is no such model (for this key), or engines have no such endpoint.",
    405: "The method is not allowed.",
    408: "The request did not arrive in time.",
    413: "The body is too large.",
    415: "The content-type is not application/json.",
    429: "Too many requests for the router, its engines or the key; see `Retry-After`.",
    431: "The head is too large.",
    501: "The engines do not support this.",
    502: "An engine's answer broke off.",
    503: "No engine is available.",
    504: "An engine did not answer in time.",
}
_ADMINS: Final = frozenset({401, 403, 415})
"""Statuses of the admin API alone, unless callers need a key."""
_GENERATION: Final[tuple[tuple[str, Kind, str, str], ...]] = (
    ("/v1/completions", "completion", "prompt", "Complete a prompt."),
    ("/v1/chat/completions", "chat", "messages", "Answer a conversation."),
)
_OWN: Final[tuple[tuple[str, str, str, str], ...]] = (
    ("get", "/v1/models", "Models of the available engines.", "application/json"),
    ("get", "/health", "Whether the router serves requests.", "application/json"),
    ("get", "/ready", "The same as /health.", "application/json"),
    ("get", "/ping", "The same as /health.", "application/json"),
    ("post", "/ping", "The same as /health.", "application/json"),
    ("get", "/healthcheck", "Numbers of engines, as vLLM's toy proxy.", "application/json"),
    ("get", "/live", "Whether the process answers.", "application/json"),
    ("get", "/version", "The router's version.", "application/json"),
    ("get", "/metrics", "Metrics, for Prometheus.", "text/plain"),
    ("get", "/openapi.json", "This document.", "application/json"),
)


def document(version: str, *, admin: bool = False, keys: bool = False, apart: bool = False) -> Json:
    """The document, as a JSON object.

    Args:
        version: the router's.
        admin: whether there is the admin API.
        keys: whether callers need a key.
        apart: whether there is a control port.
    """
    paths: dict[str, Json] = {}
    for path, kind, needed, about in _GENERATION:
        paths[path] = {"post": _posted(about, _members(kind), needed)}
    for endpoint in ENDPOINTS:
        members = {name: {"examples": [value]} for name, value in endpoint.members.items()}
        schema = {"model": READ["model"], **members}
        paths[endpoint.path] = {"post": _posted(endpoint.about, schema, *endpoint.members)}
    for method, path, about, content in _OWN:
        answer = {"description": about, "content": {content: {}}}
        answers = {"200": answer, **_errors(405, 408, 431)}
        if path in ("/health", "/ready", "/ping", "/healthcheck"):
            answers["503"] = {"description": ERRORS[503], "content": {content: {}}}
        paths.setdefault(path, {})[method] = {"summary": about, "responses": answers}
    paths["/v1/models/{model}"] = {"get": _MODEL}
    if apart:
        del paths["/metrics"]
    elif admin:
        paths |= _admin()
    components: Json = {"schemas": {"Error": _ERROR}}
    if keys:
        _ask_for_keys(paths)
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvrouter", "version": version},
        "paths": paths,
        "components": components,
    }


def _ask_for_keys(paths: dict[str, Json]) -> None:
    """Mark each path behind the gate as one that needs a key."""
    for path, methods in paths.items():
        if is_open(path):
            continue
        for method, called in methods.items():
            responses = {**called["responses"], **_errors(401)}
            methods[method] = {**called, "security": [{"key": []}], "responses": responses}


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
    errors = [status for status in ERRORS if status not in _ADMINS]
    return {
        "summary": about,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": {"description": about, "content": content}, **_errors(*errors)},
    }


def _admin() -> Json:
    """The admin API."""
    url = {"type": "string", "description": "http://HOST:PORT or HOST:PORT"}
    kind = {"enum": ["prefill", "decode", "regular"], "default": "regular"}
    schema: Json = {"type": "object", "properties": {"url": url, "worker_type": kind}}
    schema |= {"required": ["url"], "additionalProperties": False}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    worker = {"name": "worker", "in": "path", "required": True, "schema": {"type": "string"}}
    force: Json = {"name": "force", "in": "query", "schema": {"type": "boolean", "default": False}}
    force["description"] = "Remove it now; legs in flight on it break off."
    listed, shown = {200: "Every engine."}, {200: "The engine."}
    added = {202: "The engine; it takes legs after a successful probe."}
    gone = {200: "It is gone.", 202: "It drains: legs are in flight on it."}
    return {
        "/workers": {
            "get": _called("Every engine.", listed),
            "post": {**_called("Add an engine.", added, 400, 403, 413, 415), "requestBody": body},
        },
        "/workers/{worker}": {
            "get": {**_called("One engine.", shown, 404), "parameters": [worker]},
            "delete": {
                **_called("Drain an engine, or remove it now.", gone, 400, 403, 404),
                "parameters": [worker, force],
            },
        },
    }


def _called(about: str, answers: dict[int, str], *errors: int) -> Json:
    """One operation of the admin API."""
    successes = {
        str(status): {"description": text, "content": {"application/json": {}}}
        for status, text in answers.items()
    }
    return {"summary": about, "responses": {**successes, **_errors(401, 405, 408, 431, *errors)}}


def _errors(*statuses: int) -> Json:
    schema = {"$ref": "#/components/schemas/Error"}
    return {
        str(status): {
            "description": ERRORS[status],
            "content": {"application/json": {"schema": schema}},
        }
        for status in statuses
    }


_ERROR: Final[Json] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["integer", "string", "null"]},
            },
        }
    },
}
"""OpenAI's error object."""
_MODEL: Final[Json] = {
    "summary": "One model.",
    "parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}],
    "responses": {
        "200": {"description": "Its object.", "content": {"application/json": {}}},
        **_errors(400, 404, 405, 408, 431),
    },
}
