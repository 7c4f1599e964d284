"""Headers of an answer that say where its request ran and what took how long. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrouter.serving.request.request_metrics import parts_of
from kvrouter.telemetry.metrics import PARTS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvrouter.serving.request.context import RequestContext


def route_lines(context: RequestContext) -> bytes:
    """Header lines: the engines of both legs, tokens that were there already, parts of the time.

    Of a request that is served in several shares: all engines so far, and the times of the share
    that is answered first. An answer that began without an engine has no engine to name.
    """
    shares = context.shares or [context]
    lines = [
        *_engines("x-kvrouter-prefill", (share.route.prefill_engine for share in shares)),
        *_engines("x-kvrouter-decode", (share.route.decode_engine for share in shares)),
    ]
    hits = sum(share.route.hit_engine + share.route.hit_store for share in shares)
    lines.append(f"x-kvrouter-hit-tokens: {hits}")
    timed = min(
        (s for s in shares if s.timing.first_s),
        key=lambda share: share.timing.first_s,
        default=None,
    )
    if timed is not None:
        parts = zip(PARTS, parts_of(timed.timing, timed.timing.first_s), strict=True)
        told = ", ".join(f"{part};dur={seconds * 1000:.3f}" for part, seconds in parts)
        lines.append(f"server-timing: {told}")
    return ("\r\n".join(lines) + "\r\n").encode("latin-1")


def _engines(name: str, engines: Iterable[str | None]) -> list[str]:
    named = ",".join(dict.fromkeys(engine for engine in engines if engine))
    return [f"{name}: {named}"] if named else []
