"""The control side as a Quart app: the page, its document, and the rows of other control paths.

The page's files come from the package; they hold nothing of the router and need no token. What it
shows comes from /status.json, which asks for the admin token where there is one.
"""

from __future__ import annotations

from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from quart import Quart, Response, request
from werkzeug.exceptions import HTTPException

from kvrouter.access.admin_token import TOKEN_NEEDED, shows_token
from kvrouter.errors import ApiError
from kvrouter.http.head import JSON
from kvrouter.http.routes import Routes
from kvrouter.page.bridge import METHODS, answer_with

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvrouter.http.server import Handler

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
"""Nothing from elsewhere, nothing inline, and no text that becomes HTML or code."""
EVERYWHERE: Final = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "content-security-policy": POLICY,
}


def control_app(
    rows: Iterable[tuple[str, str, Handler]], document: Callable[[], bytes], token: str
) -> Quart:
    """The app of one router.

    Args:
        rows: method, path and handler of everything beside the page.
        document: makes /status.json.
        token: that /status.json asks for, as Authorization: Bearer; "" for none.
    """
    app = Quart("kvrouter", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY_BYTES
    handle = Routes(rows).handle

    @app.get("/status.json")
    async def status() -> Response:
        if token and not shows_token(request.headers.get("authorization", ""), token):
            answer = _error(ApiError(401, TOKEN_NEEDED))
            answer.headers["www-authenticate"] = "Bearer"
            return answer
        return Response(document(), content_type=JSON, headers={"cache-control": "no-store"})

    own = {"status.json", *_serve_files(app)}

    @app.route("/<path:path>", methods=METHODS)
    async def others(path: str) -> Response:
        if path in own:
            return _error(ApiError(405, f"{request.method} is not allowed here; use GET."))
        return await answer_with(handle)

    _answer_errors(app)
    return app


def page_files() -> dict[str, tuple[bytes, str]]:
    """The page's files by name, with their types."""
    folder = files("kvrouter.page") / "static"
    found = {}
    for each in folder.iterdir():
        kind = TYPES.get(each.name.rpartition(".")[2])
        if kind is not None:
            found[each.name] = each.read_bytes(), kind
    return found


def _serve_files(app: Quart) -> Iterable[str]:
    """Serve them; returns their names."""
    kept = page_files()

    def serve(name: str) -> Response:
        content, kind = kept[name]
        answer = Response(content, content_type=kind, headers={"cache-control": "no-cache"})
        answer.set_etag(sha256(content).hexdigest()[:32])
        if request.if_none_match.contains(answer.get_etag()[0] or ""):
            answer.status_code = 304
            answer.set_data(b"")
        return answer

    @app.get("/")
    async def index() -> Response:
        return serve("index.html")

    for name in kept:
        app.add_url_rule(f"/{name}", name, _server_of(serve, name))
    return kept


def _server_of(serve: Callable[[str], Response], name: str) -> Callable[[], Response]:
    return lambda: serve(name)


def _answer_errors(app: Quart) -> None:
    @app.errorhandler(HTTPException)
    async def http_error(error: HTTPException) -> Response:
        return _error(ApiError(error.code or 500, error.description or error.name))

    @app.after_request
    async def guard(answer: Response) -> Response:
        for name, value in EVERYWHERE.items():
            answer.headers[name] = value
        return answer


def _error(error: ApiError) -> Response:
    return Response(error.body(), status=error.status, content_type=JSON)
