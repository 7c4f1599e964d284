"""The OpenAPI document of the router.

Its fixed part is `openapi.yaml`. The parameters of generation come from the table of parameters,
and the passed-through endpoints from their list. Engines take more parameters, and check those that
the router does not read.
"""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

import yaml

from kvrouter.access.gate import is_open
from kvrouter.engines.families.parameter_table import Served
from kvrouter.engines.families.parameters import VLLM
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
"""Schemas of the members that the router itself reads; engines know those of the others."""
_ERRORS: Final = (400, 404, 405, 408, 413, 415, 429, 431, 501, 502, 503, 504)
"""Errors of requests that engines answer."""
_GENERATION: Final[tuple[tuple[str, Kind, str, str], ...]] = (
    ("/v1/completions", "completion", "prompt", "Complete a prompt."),
    ("/v1/chat/completions", "chat", "messages", "Answer a conversation."),
)


def document(version: str, *, admin: bool = False, keys: bool = False, apart: bool = False) -> Json:
    """The document as a JSON object: with the admin API, API keys, or a control port (`apart`)."""
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
