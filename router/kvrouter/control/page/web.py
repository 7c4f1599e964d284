"""The control port as a Quart app, and the endpoints of the status page.

The page's files contain no data of the router and need no token. The data is in /status.json, which
requires the admin token if there is one.
"""

from __future__ import annotations

from functools import partial
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING, Final

import quart
from quart import Quart
from werkzeug.datastructures import Headers
from werkzeug.exceptions import HTTPException

from kvrouter.errors import ApiError
from kvrouter.http.server.respond import HttpRequest, HttpResponse, answer, refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvrouter.access.admin_token import AdminToken
    from kvrouter.http.server.respond import Respond, Row

METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
MAX_BODY_BYTES: Final = 1 << 20
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
EVERYWHERE: Final = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "content-security-policy": POLICY,
}


def control_app(respond: Respond) -> Quart:
    """An app in which `respond` answers every request."""
    app = Quart("kvrouter", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY_BYTES

    @app.route("/", methods=METHODS)
    @app.route("/<path:_>", methods=METHODS)
    async def view(_: str = "") -> quart.Response:
        asked, headers = quart.request, quart.request.headers
        request = HttpRequest(
            asked.method,
            asked.scope["raw_path"].decode("latin-1"),
            asked.query_string.decode("latin-1"),
            {name.lower(): ", ".join(headers.getlist(name)) for name, _ in headers},
            await asked.get_data(cache=True, as_text=False, parse_form_data=False),
        )
        return _sent(answer(respond, request))

    @app.errorhandler(HTTPException)
    async def refused(error: HTTPException) -> quart.Response:
        return _sent(refusal(ApiError(error.code or 500, error.description or error.name)))

    @app.after_request
    async def guarded(response: quart.Response) -> quart.Response:
        response.headers.update(EVERYWHERE)
        return response

    return app


def _sent(response: HttpResponse) -> quart.Response:
    headers = Headers(response.headers)
    body, status, kind = response.body, response.status, response.content_type
    return quart.Response(body, status, headers, content_type=kind)


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
