"""Rebuilds a JSON object from spans of its bytes; values are never re-serialised."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    Span = tuple[int, int]


def splice(body: bytes, spans: Mapping[str, Span], changes: Mapping[str, bytes | None]) -> bytes:
    """The object of `body` with some of its members changed. Copies each kept value once.

    Args:
        body: the JSON object.
        spans: start and end in `body` of the value of every top-level member, in order.
        changes: raw JSON of a member's new value (new members go to the front); None leaves the
            member out.
    """
    edits: list[tuple[int, int, bytes]] = []
    added: list[bytes] = []
    for key, value in changes.items():
        span = spans.get(key)
        if span is None:
            if value is not None:
                added += (orjson.dumps(key), b":", value, b",")
        elif value is None:
            return _rebuild(body, spans, changes)
        else:
            edits.append((*span, value))
    edits.sort()
    view, at = memoryview(body), body.index(b"{") + 1
    if added and not spans:
        added[-1] = b""  # nothing follows
    parts: list[bytes | memoryview] = [b"{", *added]
    for start, end, value in edits:
        parts += (view[at:start], value)
        at = end
    parts.append(view[at:])
    return b"".join(parts)


def pick(body: bytes, spans: Mapping[str, Span], keys: Collection[str]) -> bytes:
    """An object of the members of `body` that are in `keys`."""
    return _rebuild(body, {key: span for key, span in spans.items() if key in keys}, {})


def _rebuild(body: bytes, spans: Mapping[str, Span], changes: Mapping[str, bytes | None]) -> bytes:
    """The same with members left out: built from the kept ones."""
    view = memoryview(body)
    parts: list[bytes | memoryview] = [b"{"]
    for key, (start, end) in spans.items():
        if key not in changes:
            parts += (orjson.dumps(key), b":", view[start:end], b",")
    for key, value in changes.items():
        if value is not None:
            parts += (orjson.dumps(key), b":", value, b",")
    parts[-1] = b"}" if len(parts) > 1 else b"{}"
    return b"".join(parts)
