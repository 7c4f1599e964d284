"""One line per request, JSON in a pipe and plain on a terminal; and the set-up of `logging`.

Lines are gathered and written a few times a second: a write per request would cost a system call.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from time import time
from typing import TYPE_CHECKING, Final

import orjson

if TYPE_CHECKING:
    from typing import TextIO

FLUSH_S: Final = 0.2
_HELD_LINES: Final = 1000


class RequestLog:
    """Writes what became of each request.

    Args:
        stream: where to; its owner closes it.
        plain: `key=value` instead of JSON.
    """

    def __init__(self, stream: TextIO, *, plain: bool) -> None:
        self._stream = stream
        self._plain = plain
        self._lines: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None

    def write(self, fields: dict[str, str | float | None]) -> None:
        """Write one line of `fields`, with the time put in as `time`."""
        fields["time"] = round(time(), 3)
        if self._plain:
            shown = (f"{key}={value}" for key, value in fields.items() if value is not None)
            line = " ".join(shown).encode()
        else:
            line = orjson.dumps(fields)
        self._lines.append(line)
        if len(self._lines) >= _HELD_LINES:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        """Write what is held; a stream that cannot be written to costs the lines, not the loop."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        lines, self._lines = self._lines, []
        if not lines:
            return
        try:
            self._stream.write(b"\n".join(lines).decode() + "\n")
            self._stream.flush()
        except (OSError, ValueError) as error:
            logging.getLogger(__name__).debug("request log: %s", error)


class JsonFormatter(logging.Formatter):
    """Records as one JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of `record`."""
        fields = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(fields).decode()


def set_up(level: str) -> RequestLog | None:
    """Configure `logging` for this process, to stderr.

    Returns:
        the log of requests, or None where `level` is above info.
    """
    plain = sys.stderr.isatty()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
        if plain
        else JsonFormatter()
    )
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=number, handlers=[handler], force=True)
    return RequestLog(sys.stderr, plain=plain) if number <= logging.INFO else None
