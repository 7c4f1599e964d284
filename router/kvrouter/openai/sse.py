"""Server-sent events, as OpenAI's API streams them: cut, read and written here alone. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from kvrouter.errors import ApiError, names_events

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Callable


DONE: Final = b"[DONE]"  # data of the last event of a stream
DONE_EVENT: Final = b"data: [DONE]\n\n"
MAX_EVENT_BYTES: Final = 8 << 20  # an event that grows longer than this before its end is no event
MAX_LINES: Final = 12_000
"""Of events that are read one by one: only strangers send more at once, which pass as one."""
BOM: Final = b"\xef\xbb\xbf"
_ENDS: Final = (b"\n\n", b"\n\r\n", b"\r\r")
_LONGEST_END: Final = 4
_END: Final = re.compile(rb"\r?\n\r?\n|\r\r")


def event(data: bytes) -> bytes:
    """An event whose data is one line."""
    return b"data: " + data + b"\n\n"


def error_events(error: ApiError, path: str = "", events: int = 0) -> bytes:
    """What ends a stream of an endpoint that fails after so many events, as its clients read it."""
    return last_events(error.event(path, events), path)


def last_events(data: bytes, path: str = "") -> bytes:
    """The data of an error, and OpenAI's end mark where streams have one."""
    if names_events(path):
        return b"event: error\n" + event(data)
    return event(data) + DONE_EVENT


def data_of(one: bytes) -> bytes | None:
    """The data of one event, its lines joined; None if it has none, as a comment."""
    if one.startswith(b"data: ") and b"\n" not in one:
        return one[6:].rstrip(b"\r")
    lines = [line[5:].removeprefix(b" ") for line in one.splitlines() if line[:5] == b"data:"]
    return b"\n".join(lines) if lines else None


def split_events(events: bytes) -> list[bytes]:
    """Whole events one by one, each without the blank line at its end."""
    return _END.split(events)[:-1]


def map_data(events: bytes, change: Callable[[bytes], bytes | None]) -> bytes:
    """Whole events with the data of every line changed.

    A line whose data `change` returns as it is stays byte for byte. None leaves out its event.
    """
    kept: list[bytes] = []
    dropped = False
    lines = events.split(b"\n", MAX_LINES)
    for line in lines:
        if line.startswith(b"data:") or (line is lines[-1] and len(lines) > MAX_LINES):
            data = line[5:].strip()
            changed = change(data)
            dropped = changed is None
            if changed is not None:
                kept.append(line if changed is data else b"data: " + changed)
        elif dropped and not line.strip():
            dropped = False  # the blank line at the end of the event that was left out
        else:
            kept.append(line)
    return b"\n".join(kept)


class EventBuffer:
    """Cuts a stream at the ends of its events, wherever its pieces were cut.

    A byte order mark is left out: it may come after comments that were sent before the stream.
    """

    __slots__ = ("_begun", "_held")

    def __init__(self) -> None:
        self._begun = False
        self._held = bytearray()

    def __len__(self) -> int:
        """Bytes of the event that has not ended."""
        return len(self._held)

    def take(self, piece: bytes) -> bytes:
        """The events that are whole now, as they came; the rest is held."""
        held = self._held
        seen = max(0, len(held) - _LONGEST_END + 1)
        held += piece
        found = ((held.rfind(mark, seen), len(mark)) for mark in _ENDS)
        end = max(at + size if at >= 0 else 0 for at, size in found)
        events = bytes(held[:end])
        del held[:end]
        return events if self._begun else self._without_mark(events)

    def rest(self) -> bytes:
        """What came after the last end; it is not held any more."""
        rest = bytes(self._held)
        self._held.clear()
        return rest if self._begun else self._without_mark(rest)

    def _without_mark(self, events: bytes) -> bytes:
        self._begun = bool(events)
        return events.removeprefix(BOM)


async def read_data(pieces: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """The data of each event of a stream that comes in `pieces`.

    ValueError: an event is longer than `MAX_EVENT_BYTES`.
    """
    buffer = EventBuffer()
    async for piece in pieces:
        for one in split_events(buffer.take(piece)):
            data = data_of(one)
            if data is not None:
                yield data
        if len(buffer) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
