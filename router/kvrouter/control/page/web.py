"""The handler of the control port, and the endpoints of the status page.

The page's files contain no data of the router and need no token. The data is in /status.json, which
requires the admin token if there is one.
"""

from __future__ import annotations

import time
from functools import partial
from hashlib import sha256
from importlib.resources import files
from re import ASCII, fullmatch
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qs, parse_qsl, unquote

from kvrouter.errors import ApiError, bad_request
from kvrouter.fates.recent import KEPT
from kvrouter.http.server.respond import HttpRequest, HttpResponse, answer, as_json
from kvrouter.http.server.routes import on_exchange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvrouter.access.setup import AdminToken
    from kvrouter.fates.recent import Recent
    from kvrouter.http.server.listener import Handler
    from kvrouter.http.server.respond import Respond, Row

TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for "
    "'script'; trusted-types 'none'"
)
"""No foreign and no inline content, and no text that becomes HTML or code."""
EVERYWHERE: Final = (
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-resource-policy", "same-origin"),
    ("cross-origin-opener-policy", "same-origin"),
    ("content-security-policy", POLICY),
)


def control_app(respond: Respond) -> Handler:
    """A handler that answers every request as `respond` does, with headers that guard browsers."""
    return on_exchange(lambda request: _guarded(answer(respond, request)))


def _guarded(response: HttpResponse) -> HttpResponse:
    return response._replace(headers=(*response.headers, *EVERYWHERE))


def page_rows(document: Callable[[], bytes], token: AdminToken) -> Iterator[Row]:
    """Endpoints of the status page; /status.json requires `token`."""
    yield "GET", "/status.json", partial(_status, document, token)
    for each in (files("kvrouter.control.page") / "static").iterdir():
        kind = TYPES.get(each.name.rpartition(".")[2])
        if kind is None:
            continue
        content = each.read_bytes()
        etag = f'"{sha256(content).hexdigest()[:32]}"'
        respond = partial(_file, content, kind, etag)
        yield "GET", f"/{each.name}", respond
        if each.name == "index.html":
            yield "GET", "/", respond


def _status(document: Callable[[], bytes], token: AdminToken, request: HttpRequest) -> HttpResponse:
    token.ask(request.headers)
    return HttpResponse(200, document(), headers=(("cache-control", "no-store"),))


def store_size_row(found: Callable[[float], float], token: AdminToken) -> Row:
    """GET /store-size?bytes=N: the share of prompt tokens that a store of N bytes would find."""

    def respond(request: HttpRequest) -> HttpResponse:
        token.ask(request.headers)
        size = parse_qs(request.query).get("bytes", [""])[0]
        if not fullmatch(r"\d{1,19}", size, ASCII):
            raise bad_request("`bytes` must be the size of a store in bytes.", "bytes")
        return as_json(200, {"store_bytes": int(size), "found": found(float(size))})

    return "GET", "/store-size", respond


def _file(content: bytes, kind: str, etag: str, request: HttpRequest) -> HttpResponse:
    headers = (("cache-control", "no-cache"), ("etag", etag))
    if etag in request.headers.get("if-none-match", ""):
        return HttpResponse(304, b"", kind, headers)
    return HttpResponse(200, content, kind, headers)


def why_rows(recent: Recent, settle: Callable[[], None], token: AdminToken) -> Iterator[Row]:
    """Pages of text, why prompt tokens were computed; `settle` counts requests that have ended."""

    def tell(request: HttpRequest) -> HttpResponse:
        token.ask(request.headers)
        settle()
        request_id, given = unquote(request.path.removeprefix("/why")[1:]), parse_qsl(request.query)
        query = {name: value for name, value in given if name in ("model", "key", "session")}
        told = recent.story(request_id) if request_id else recent.ladder(time.time(), **query)
        if told is None:
            raise ApiError(404, f"It is not among the last {KEPT:,} requests that have fates.")
        return HttpResponse(200, told.encode(), "text/plain; charset=utf-8")

    yield from (("GET", path, tell) for path in ("/why", "/why/"))
