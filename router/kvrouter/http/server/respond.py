"""Endpoints as functions: a request in, a response out, without a server or a connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from kvrouter.errors import ApiError
from kvrouter.http.headers import JSON

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Respond = Callable[["HttpRequest"], "HttpResponse"]
    Row = tuple[str, str, Respond]
    """Method, path, and what answers; a path that ends in "/" stands for all below it."""


class HttpRequest(NamedTuple):
    """A whole request; its members are those of `kvrouter.http.server.exchange.Exchange`."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes
    principal: object | None = None


class HttpResponse(NamedTuple):
    """A whole answer."""

    status: int
    body: bytes
    content_type: str = JSON
    headers: tuple[tuple[str, str], ...] = ()


def as_json(status: int, value: Any, headers: tuple[tuple[str, str], ...] = ()) -> HttpResponse:
    """An answer of JSON."""
    return HttpResponse(status, orjson.dumps(value), headers=headers)


def refusal(error: ApiError) -> HttpResponse:
    """The answer for an error."""
    return HttpResponse(error.status, error.body(), headers=error.headers())


def answer(respond: Respond, request: HttpRequest) -> HttpResponse:
    """What `respond` answers, or the ApiError that it raises."""
    try:
        return respond(request)
    except ApiError as error:
        return refusal(error)
