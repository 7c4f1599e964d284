"""How commands log: JSON lines in a pipe, plain ones on a terminal. An import sets nothing up.

No text is longer than MAX_TEXT, whatever a peer had it say. Lines go to stderr from a thread of
their own. A reader that stops reading (a full pipe, a stopped terminal) then costs lines, which are
counted, and never stops the event loop.
"""

import contextlib
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import orjson

MAX_HELD_BYTES = 1 << 20
"""Bytes that wait for a slow reader; lines beyond are dropped."""
MAX_TEXT = 8192
"""Characters of a message, and of a traceback."""
CLOSE_TIMEOUT_S = 1.0
"""How long the end of the process waits for lines that are not written yet."""


class PlainFormatter(logging.Formatter):
    """Records as lines for people."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line without a traceback."""
        record.message = cut(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        """The traceback; its end says what happened."""
        return cut(super().formatException(ei), end=True)


class JsonFormatter(PlainFormatter):
    """Records as one JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of `record`."""
        fields = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": cut(record.getMessage()),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        try:
            return orjson.dumps(fields).decode()
        except orjson.JSONEncodeError:  # a lone surrogate, which UTF-8 cannot encode
            texts = ((name, each) for name, each in fields.items() if isinstance(each, str))
            whole = {name: each.encode("utf-8", "replace").decode() for name, each in texts}
            return orjson.dumps(fields | whole).decode()


def cut(text: str, *, end: bool = False) -> str:
    """The beginning of `text`, or its end, and how much is left out."""
    more = len(text) - MAX_TEXT
    if more <= 0:
        return text
    left_out = f"[{more} characters are left out]"
    return f"{left_out} {text[more:]}" if end else f"{text[:MAX_TEXT]} {left_out}"


class LogWriter:
    """Writes lines from a thread, which starts with the first line.

    Args:
        out: a file descriptor, which stays open and belongs to the caller; or what takes bytes as
            `os.write` does, and raises OSError.
        max_bytes: how much may wait to be written.

    Attributes:
        dropped: lines that were not written, because the reader was too slow or is gone.
    """

    def __init__(
        self, out: int | Callable[[memoryview], int], max_bytes: int = MAX_HELD_BYTES
    ) -> None:
        self._out = partial(os.write, out) if isinstance(out, int) else out
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._held_bytes = 0
        self._thread: threading.Thread | None = None
        self._closed = False
        self.dropped = 0

    def write(self, lines: bytes) -> None:
        """Have whole lines written soon; never blocks. Drops them where too much waits."""
        with self._changed:
            if self._closed or self._held_bytes + len(lines) > self._max_bytes:
                self.dropped += lines.count(b"\n")
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
                self._thread.start()
            self._waiting.append(lines)
            self._held_bytes += len(lines)
            self._changed.notify_all()

    def flush(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Wait until all that was given is written; False where that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._held_bytes, timeout_s)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Flush, then drop what still comes. A thread that is blocked ends with the process."""
        self.flush(timeout_s)
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                lines = self._waiting.popleft()
            left = self._put(lines)
            with self._changed:
                self._held_bytes -= len(lines)
                self.dropped += bytes(left).count(b"\n")
                self._changed.notify_all()

    def _put(self, lines: bytes) -> memoryview:
        """Write `lines`; what is left of them where no more are taken."""
        left = memoryview(lines)
        with contextlib.suppress(OSError):
            while left:
                left = left[self._out(left) :]
        return left


class _WriterHandler(logging.Handler):
    """Gives formatted records to a `LogWriter`, which it owns."""

    def __init__(self, writer: LogWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        self._writer.write(f"{line}\n".encode(errors="replace"))

    def close(self) -> None:
        """At the end of the process, by `logging.shutdown`."""
        self._writer.close()
        super().close()


def log_to_stderr(level: str, form: str = "auto") -> tuple[LogWriter, bool]:
    """Configure `logging` for this process, from the level named `level` on.

    Args:
        level: the name of the lowest.
        form: text, json, or auto: text on a terminal, else JSON.

    Returns:
        what writes to stderr, and whether lines are text.
    """
    plain = sys.stderr.isatty() if form == "auto" else form == "text"
    writer = LogWriter(sys.stderr.fileno())
    handler = _WriterHandler(writer)
    handler.setFormatter(PlainFormatter() if plain else JsonFormatter())
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=number, handlers=[handler], force=True)
    return writer, plain
