"""One line per request, JSON in a pipe and plain on a terminal, as `kvstore.log` has the others.

Lines are gathered, and encoded and written together a few times a second: what a line costs is
paid for in a tight loop, not amid the next request, and no request costs a system call.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from time import time
from typing import TYPE_CHECKING, Final

from msgspec import Struct
from msgspec.json import Encoder

from kvstore.log import log_to_stderr

if TYPE_CHECKING:
    from typing import BinaryIO

FLUSH_S: Final = 0.2
_HELD_LINES: Final = 128


class Line(Struct, omit_defaults=True, gc=False):
    """What became of one request; fields without a value are left out of its line.

    docs/observability.md says what each tells. Times are in ms, but for `time`.
    """

    request_id: str
    key: str | None = None
    trace_id: str | None = None
    status: int | None = None
    outcome: str | None = None
    path: str | None = None
    client: str | None = None
    model: str | None = None
    stream: bool | None = None
    prompt_tokens: int | None = None
    hit_engine_tokens: int | None = None
    hit_store_tokens: int | None = None
    cached_tokens: int | None = None
    generated: int | None = None
    plan: str | None = None
    prefill: str | None = None
    decode: str | None = None
    attempts: int | None = None
    shares: int | None = None
    landed_blocks: int | None = None
    queue_ms: float | None = None
    tokenise_ms: float | None = None
    plan_ms: float | None = None
    prefill_ms: float | None = None
    landing_ms: float | None = None
    decode_ms: float | None = None
    ttft_ms: float | None = None
    total_ms: float | None = None
    error: str | None = None
    time: float | None = None


class RequestLog:
    """Writes what became of each request.

    Args:
        stream: where to; its owner closes it.
        plain: `key=value` instead of JSON.
    """

    def __init__(self, stream: BinaryIO, *, plain: bool) -> None:
        self._stream = stream
        self._encode = _plain if plain else Encoder().encode_lines
        self._held: list[Line] = []
        self._timer: asyncio.TimerHandle | None = None

    def write(self, line: Line) -> None:
        """Write `line`, with the time put in where it has none."""
        if line.time is None:
            line.time = round(time(), 3)
        self._held.append(line)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)
        elif len(self._held) >= _HELD_LINES:
            self.flush()

    def flush(self) -> None:
        """Write what is held; a stream that cannot be written to costs the lines, not the loop."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        held, self._held = self._held, []
        if not held:
            return
        try:
            self._stream.write(self._encode(held))
            self._stream.flush()
        except (OSError, ValueError) as error:
            logging.getLogger(__name__).debug("request log: %s", error)


def _plain(lines: list[Line]) -> bytes:
    """`lines` for people."""
    text = ""
    for line in lines:
        shown = ((name, getattr(line, name)) for name in line.__struct_fields__)
        text += " ".join(f"{name}={value}" for name, value in shown if value is not None) + "\n"
    return text.encode()


def set_up(level: str) -> RequestLog | None:
    """Configure `logging` for this process, to stderr.

    Returns:
        the log of requests, or None where `level` is above info.
    """
    plain = log_to_stderr(level)
    wanted = logging.getLogger().isEnabledFor(logging.INFO)
    return RequestLog(sys.stderr.buffer, plain=plain) if wanted else None
