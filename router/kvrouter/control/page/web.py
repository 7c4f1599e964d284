"""The handler of the control port, and the endpoints of the status page.

The page's files contain no data of the router and need no token. The data is in /status.json, which
requires the admin token if there is one.
"""

from __future__ import annotations

from functools import partial
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from kvrouter.http.server.respond import HttpRequest, HttpResponse, answer
from kvrouter.http.server.routes import on_exchange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvrouter.access.setup import AdminToken
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


def _file(content: bytes, kind: str, etag: str, request: HttpRequest) -> HttpResponse:
    headers = (("cache-control", "no-cache"), ("etag", etag))
    if etag in request.headers.get("if-none-match", ""):
        return HttpResponse(304, b"", kind, headers)
    return HttpResponse(200, content, kind, headers)
