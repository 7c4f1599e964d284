"""Bytes of HTTP/1.1 heads and chunk frames. Pure functions; no sockets, no state."""

from collections.abc import Iterable
from functools import lru_cache
from http import HTTPStatus

Headers = Iterable[tuple[str, str]]

LAST_CHUNK = b"0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
JSON = "application/json"
SSE_HEADERS: tuple[tuple[str, str], ...] = (
    ("content-type", "text/event-stream; charset=utf-8"),
    ("cache-control", "no-cache"),
    ("x-accel-buffering", "no"),
)


@lru_cache(maxsize=128)
def status_line(status: int) -> bytes:
    """`HTTP/1.1 200 OK` and its line end; a status without a registered phrase gets none."""
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode("ascii")


def encode_headers(headers: Headers) -> bytes:
    """Header lines as bytes, latin-1.

    ValueError: a name or a value holds CR, LF or NUL, which would let it forge a header.
    """
    lines = []
    for name, value in headers:
        line = f"{name}: {value}"
        if not line.isprintable() and any(mark in line for mark in "\r\n\0"):
            raise ValueError(f"header {name!r} holds a line break or NUL")
        lines.append(line)
    if not lines:
        return b""
    lines.append("")
    return "\r\n".join(lines).encode("latin-1", "replace")


def chunk(data: bytes) -> bytes:
    """One chunk frame. `data` must not be empty: an empty chunk ends the body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def chunk_head(size: int) -> bytes:
    """The beginning of a chunk frame whose `size` bytes are sent by themselves, then a line end."""
    return b"%x\r\n" % size


def unchunk(frames: bytes) -> bytes:
    """The body within whole, valid chunk frames."""
    parts, at = [], 0
    while at < len(frames):
        start = frames.index(b"\r\n", at) + 2
        end = start + int(frames[at : start - 2], 16)
        parts.append(frames[start:end])
        at = end + 2
    return b"".join(parts)
