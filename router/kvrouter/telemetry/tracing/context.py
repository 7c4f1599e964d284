"""W3C trace context: reads the headers of clients, and writes those for engines. Pure.

https://www.w3.org/TR/trace-context/. Headers that break its rules or limits are ignored.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_STATE_CHARS: Final = 512
MAX_STATE_MEMBERS: Final = 32
_PARENT: Final = re.compile(
    r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.{0,200})?"
)
_NO_VERSION: Final = "ff"
_KEY: Final = r"[a-z0-9][a-z0-9_\-*/@]{0,255}"
_VALUE: Final = r"[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
_MEMBER: Final = re.compile(f"{_KEY}={_VALUE}")


@dataclass(frozen=True, slots=True)
class Parent:
    """The client's span: whether it is recorded, and its `tracestate` ("" without a valid one)."""

    trace_id: int
    span_id: int
    sampled: bool
    state: str = ""


def read_parent(headers: Mapping[str, str]) -> Parent | None:
    """The parent in the headers of a request; None without a valid one."""
    given = headers.get("traceparent")
    if given is None:
        return None
    found = _PARENT.fullmatch(given)
    if found is None:
        return None
    version, trace, span, flags, more = found.groups()
    trace_id, span_id = int(trace, 16), int(span, 16)
    if version == _NO_VERSION or not trace_id or not span_id or (more and version == "00"):
        return None
    return Parent(trace_id, span_id, bool(int(flags, 16) & 1), _state(headers.get("tracestate")))


def context_lines(trace_id: int, span_id: int, state: str, *, sampled: bool) -> bytes:
    """Header lines that make `span_id` the parent of an engine's spans, or switch them off."""
    line = b"traceparent: 00-%032x-%016x-%02x\r\n" % (trace_id, span_id, sampled)
    return line + b"tracestate: %b\r\n" % state.encode("ascii") if state else line


def _state(given: str | None) -> str:
    """A valid `tracestate` within the least length that all must support; else ""."""
    if not given or len(given) > MAX_STATE_CHARS:
        return ""
    members = [member.strip(" \t") for member in given.split(",")]
    members = [member for member in members if member]
    keys = {member.partition("=")[0] for member in members}
    if len(members) > MAX_STATE_MEMBERS or len(keys) < len(members):
        return ""
    return ",".join(members) if all(map(_MEMBER.fullmatch, members)) else ""
