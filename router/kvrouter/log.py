"""One line per request, JSON in a pipe and plain on a terminal, as `kvstore.log` has the others.

Lines are gathered and written a few times a second: a write per request would cost a system call.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from time import time
from typing import TYPE_CHECKING, Final

import orjson

from kvstore.log import log_to_stderr

if TYPE_CHECKING:
    from typing import TextIO

Line = dict[str, str | float | bool | None]
"""One line: values by field."""

FLUSH_S: Final = 0.2
_HELD_BYTES: Final = 64 * 1024


class RequestLog:
    """Writes what became of each request.

    Args:
        stream: where to; its owner closes it.
        plain: `key=value` instead of JSON.
    """

    def __init__(self, stream: TextIO, *, plain: bool) -> None:
        self._stream = stream
        self._plain = plain
        self._held = bytearray()  # one piece: a thousand lines apart cost a page fault each
        self._timer: asyncio.TimerHandle | None = None

    def write(self, fields: Line) -> None:
        """Write one line of `fields`, with the time put in as `time`."""
        fields["time"] = int(time() * 1000) / 1000  # a tenth of what `round` takes
        if self._plain:
            shown = (f"{key}={value}" for key, value in fields.items() if value is not None)
            line = " ".join(shown).encode()
        else:
            line = orjson.dumps(fields)
        self._held += line
        self._held += b"\n"
        if len(self._held) >= _HELD_BYTES:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        """Write what is held; a stream that cannot be written to costs the lines, not the loop."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        held, self._held = self._held, bytearray()
        if not held:
            return
        try:
            self._stream.write(held.decode())
            self._stream.flush()
        except (OSError, ValueError) as error:
            logging.getLogger(__name__).debug("request log: %s", error)


def set_up(level: str) -> RequestLog | None:
    """Configure `logging` for this process, to stderr.

    Returns:
        the log of requests, or None where `level` is above info.
    """
    plain = log_to_stderr(level)
    wanted = logging.getLogger().isEnabledFor(logging.INFO)
    return RequestLog(sys.stderr, plain=plain) if wanted else None
