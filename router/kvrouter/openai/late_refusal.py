"""An engine's refusal when a stream has begun already, with comments: an event of it. Pure."""

from __future__ import annotations

import orjson

from kvrouter.errors import ApiError, speaks_anthropic
from kvrouter.http.bounded_json import bounded
from kvrouter.openai.endpoints import RESPONSES
from kvrouter.openai.sse import error_events, last_events


def refusal_events(status: int, body: bytes, path: str = "") -> bytes:
    """What ends a stream to `path` if an engine refused the request with this answer.

    It keeps the engine's own JSON where clients of that endpoint read it in a stream.
    """
    error = ApiError(status, f"The engine answers {status}.")
    try:
        told = orjson.loads(bounded(body))
        given = told["error"]
        error.message = str(given["message"])
        error.param, error.code = given.get("param"), given.get("code") or status
    except (ValueError, TypeError, KeyError, AttributeError):
        return error_events(error, path)
    foreign = told.get("type") != "error" if speaks_anthropic(path) else path == RESPONSES
    return error_events(error, path) if foreign else last_events(orjson.dumps(told), path)
