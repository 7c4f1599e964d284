"""Who may use a node's HTTP side: with tokens, whoever sends one as `Authorization: Bearer`.

With or without tokens, pages of other sites in a browser may change nothing.
"""

from collections.abc import Callable

from quart import Quart, Response, has_request_context, jsonify, request

from kvrouter_store._core import StoreServer
from kvrouter_store.connection.cross_origin import cross_origin_refusal
from kvrouter_store.connection.tokens import bearer_token

__all__ = [
    "OPEN_PATHS",
    "TenantsNode",
    "bearer",
    "error_answer",
    "refuse_cross_origin",
    "require_token",
]

# What tells nothing but that the process serves; a supervisor has no token.
OPEN_PATHS = frozenset({"/healthz"})


def bearer() -> str:
    """The token that came with the HTTP request being served; '' without one."""
    if not has_request_context():
        return ""
    return bearer_token(request.headers.get("Authorization", ""))


class TenantsNode:
    """A node of tenants, as its HTTP side sees it: what is forgotten is the caller's own."""

    def __init__(self, server: StoreServer) -> None:
        self._server = server

    @property
    def draining(self) -> bool:
        """Whether the node lets what is under way end before it leaves."""
        return self._server.draining

    def stats(self) -> dict[str, int]:
        """The whole node's gauges and counters."""
        return self._server.stats()

    def flush_disk(self, timeout_s: float) -> tuple[str, int, int]:
        """Wait until what is committed, of whichever tenant, is durable on the disk."""
        return self._server.flush_disk(timeout_s)

    def purge(self) -> int:
        """Forget the blocks of the tenant whose token came with the request; how many."""
        return self._server.purge(bearer())


def require_token(app: Quart, admits: Callable[[str], bool]) -> None:
    """Answer 401 to every request, but those to OPEN_PATHS, whose token `admits` does not take."""

    @app.before_request
    async def check() -> tuple[Response, int] | None:
        if request.path in OPEN_PATHS or admits(bearer()):
            return None
        message = "this node needs a token: send it as Authorization: Bearer TOKEN"
        answer, status = error_answer(401, message, "unauthorized")
        answer.headers["WWW-Authenticate"] = 'Bearer realm="kvstore"'
        return answer, status


def refuse_cross_origin(app: Quart) -> None:
    """Answer 403 to what would change something and comes from a page of another origin."""

    @app.before_request
    async def check() -> tuple[Response, int] | None:
        headers = {name.lower(): value for name, value in request.headers.items()}
        why = cross_origin_refusal(request.method, headers)
        return error_answer(403, why, "forbidden") if why else None


def error_answer(status: int, message: str, kind: str) -> tuple[Response, int]:
    """An error in OpenAI's shape."""
    error = {"message": message, "type": kind, "param": None, "code": status}
    return jsonify(error=error), status
