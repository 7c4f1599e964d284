"""The client's headers that engines get, and what legs change in them. Pure."""

from __future__ import annotations

import re
from secrets import token_hex
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

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
