"""Header lines of a request: what legs carry of the client's, and what the answer says. Pure."""

from __future__ import annotations

import re
from operator import attrgetter
from secrets import token_hex
from typing import TYPE_CHECKING, Final

from kvrouter.serving.request.summary import parts_of
from kvrouter.telemetry.metrics import PARTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvrouter.serving.request.context import RequestContext

TRACED: Final = ("traceparent", "tracestate")
FORWARDED: Final = ("authorization", *TRACED, "baggage", "x-session-id", "x-data-parallel-rank")
"""Headers of the client that both legs carry, besides the request's id."""
_RANK: Final = re.compile(rb"^x-data-parallel-rank:[^\r\n]*\r\n", re.MULTILINE)
_ID: Final = re.compile(rb"^x-request-id: [^\r\n]*", re.MULTILINE)
_CONTEXT: Final = re.compile(rb"^traceparent: [^\r\n]*", re.MULTILINE)


def leg_fields(request_id: str, headers: Mapping[str, str], context: bytes | None = None) -> bytes:
    """Header lines for both legs of a request. The parser has refused line breaks in values.

    Lines of a trace `context` replace the client's.
    """
    lines = f"content-type: application/json\r\nx-request-id: {request_id}\r\n"
    for name in FORWARDED:
        if name in headers and (context is None or name not in TRACED):
            lines += f"{name}: {headers[name]}\r\n"
    return lines.encode("latin-1") + (context or b"")


def without_rank(fields: bytes) -> bytes:
    """Header lines of `leg_fields`, without the data-parallel rank that the client named."""
    return _RANK.sub(b"", fields)


def with_own_id(fields: bytes) -> bytes:
    """Header lines of `leg_fields`, with a request id that begins like theirs and is unique."""
    suffix = f"-{token_hex(8)}".encode()
    return _ID.sub(lambda found: found[0] + suffix, fields, count=1)


def with_id(fields: bytes, request_id: str) -> bytes:
    """Header lines of `leg_fields`, with that request id."""
    line = b"x-request-id: " + request_id.encode("latin-1")
    return _ID.sub(lambda _: line, fields, count=1)


def with_context(fields: bytes, other: bytes) -> bytes:
    """Header lines `fields`, with the trace context of `other`."""
    found = _CONTEXT.search(other)
    return fields if found is None else _CONTEXT.sub(lambda _: found[0], fields, count=1)


def answer_fields(context: RequestContext) -> bytes:
    """Header lines of the answer: the request's id and, by option, where it ran."""
    line = b"x-request-id: %b\r\n" % context.request_id.encode("latin-1")
    return line + _route_lines(context) if context.route_headers else line


def _route_lines(context: RequestContext) -> bytes:
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
        plan = context.route.plan
        if plan is not None and plan.predicted_s:
            lines.append(f"x-kvrouter-plan: {plan.why}; predicted={plan.predicted_s:.3f}\r\n")
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
