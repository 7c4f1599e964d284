"""Lets pages of other origins read answers, where the operator allows it (CORS, Fetch standard).

There are no cookies here: a page brings its key in a header, so that `*` is as good as its origin.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvrouter.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvrouter.http.server.exchange import Exchange
    from kvrouter.http.server.listener import AtHead

ANY: Final = "*"
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s*\"]+")
_USUAL_PORT: Final = re.compile(r"(?<=^http:)(//.+):80$|(?<=^https:)(//.+):443$")
_JSON_MARKS: Final = re.compile(r'^\[?"|"\]?$')
_ALLOWED: Final = b"access-control-allow-origin: %b\r\naccess-control-expose-headers: *\r\n"
_VARY: Final = b"vary: Origin\r\n"
_PERMITTED: Final = (
    ("access-control-allow-methods", "GET, POST"),
    ("access-control-max-age", "7200"),  # seconds; Chromium keeps it no longer
)


def read_origins(items: Iterable[str]) -> list[str]:
    """Origins as browsers send them, also from vLLM's JSON list; ValueError with the remedy."""
    found = []
    for item in items:
        bare = _JSON_MARKS.sub("", item).lower().removesuffix("/")
        if bare != ANY and not _ORIGIN.fullmatch(bare):
            raise ValueError(f"origin {item!r}: give it as https://HOST, http://HOST:PORT, or *")
        found.append(_USUAL_PORT.sub(r"\1\2", bare))
    return found


@dataclass(frozen=True, slots=True)
class Cors:
    """Says which pages may read answers, and answers browsers that ask before they send."""

    origins: frozenset[str]  # those of the pages; ANY: all
    closed: str  # paths below this are for no page

    def fields(self, path: str, headers: Mapping[str, str]) -> bytes:
        """Header lines of any answer to a request with these headers."""
        if path.startswith(self.closed):
            return b""
        if ANY in self.origins:
            return _ALLOWED % b"*"
        origin = headers.get("origin", "")
        return (_ALLOWED % origin.encode() if origin in self.origins else b"") + _VARY

    def before(self, at_head: AtHead) -> AtHead:
        """`at_head`, but for questions of browsers: they carry no key, and end here."""

        def look(exchange: Exchange) -> None:
            asked = "access-control-request-method" in exchange.headers
            if exchange.method == "OPTIONS" and asked and "origin" in exchange.headers:
                self._permit(exchange)
            else:
                at_head(exchange)

        return look

    def _permit(self, exchange: Exchange) -> None:
        if b"access-control-allow-origin" not in exchange.added:
            error = ApiError(
                403, "Pages of this origin may not send this: see --cors-allow-origin."
            )
            exchange.respond(error.status, error.body(exchange.path))
            return
        wanted = exchange.headers.get("access-control-request-headers", "")
        exchange.start(204, (*_PERMITTED, ("access-control-allow-headers", wanted)))
        return exchange.end()
