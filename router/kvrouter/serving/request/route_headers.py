"""Headers of an answer that say where its request ran and what took how long. Pure."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from kvrouter.serving.request.ttft_parts import parts_of
from kvrouter.telemetry.metrics import PARTS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvrouter.serving.request.context import RequestContext


def route_lines(context: RequestContext) -> bytes:
    """Header lines: the engines of both legs, tokens that were there already, parts of the time.

    For a request that is served in several shares: all engines so far, and the times of the share
    that is answered first. An answer that began without an engine names none.
    """
    shares = context.shares or [context]
    lines = [
        *_engines("x-kvrouter-prefill", (share.route.prefill_engine for share in shares)),
        *_engines("x-kvrouter-decode", (share.route.decode_engine for share in shares)),
    ]
    if context.endpoint is None:
        hits = sum(share.route.hit_engine + share.route.hit_store for share in shares)
        lines.append(f"x-kvrouter-hit-tokens: {hits}\r\n")
    times = [share.timing for share in shares if share.timing.first_s]
    if times:
        first = min(times, key=attrgetter("first_s"))
        parts = zip(PARTS, parts_of(first, first.first_s), strict=True)
        durations = (f"{part};dur={seconds * 1000:.3f}" for part, seconds in parts)
        lines.append(f"server-timing: {', '.join(durations)}\r\n")
    return "".join(lines).encode("latin-1")


def _engines(name: str, engines: Iterable[str | None]) -> list[str]:
    named = ",".join(dict.fromkeys(engine for engine in engines if engine))
    return [f"{name}: {named}\r\n"] if named else []
