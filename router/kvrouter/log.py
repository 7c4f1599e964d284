"""One line per request, JSON in a pipe and plain on a terminal, as `kvstore.log` has the others.

Lines are encoded at once and written together a few times a second, so that no request costs a
system call.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from time import time
from typing import TYPE_CHECKING, Final, NamedTuple

import orjson

from kvrouter._native import JsonLines
from kvstore.log import log_to_stderr

if TYPE_CHECKING:
    from typing import BinaryIO

FLUSH_S: Final = 0.2
_HELD_BYTES: Final = 1 << 16


class Line(NamedTuple):
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

    Attributes:
        lines: takes lines; whoever adds to them says so to `written`.
    """

    def __init__(self, stream: BinaryIO, *, plain: bool) -> None:
        self._stream = stream
        self._plain = plain
        self.lines = JsonLines(Line._fields)
        self._timer: asyncio.TimerHandle | None = None

    def write(self, line: Line) -> None:
        """Write `line`, with the time put in where it has none."""
        if line.time is None:
            line = line._replace(time=time())
        self.lines.add(line)
        self.written()

    def written(self) -> None:
        """Lines may have been added to `lines`: they go out soon."""
        held_bytes = len(self.lines)
        if held_bytes >= _HELD_BYTES:
            self.flush()
        elif held_bytes and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)

    def close(self) -> None:
        """Write what is held; the stream is left to its owner."""
        self.flush()

    def flush(self) -> None:
        """Write what is held; a stream that cannot be written to costs the lines, not the loop."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        held = self.lines.take()
        if not held:
            return
        try:
            self._stream.write(_for_people(held) if self._plain else held)
            self._stream.flush()
        except (OSError, ValueError) as error:
            logging.getLogger(__name__).debug("request log: %s", error)


def _for_people(lines: bytes) -> bytes:
    """`lines` of JSON as `key=value`."""
    told = (orjson.loads(line) for line in lines.splitlines())
    text = (" ".join(f"{name}={value}" for name, value in line.items()) for line in told)
    return "".join(f"{line}\n" for line in text).encode()


def set_up(level: str) -> RequestLog | None:
    """Configure `logging` for this process, to stderr.

    Returns:
        the log of requests, or None where `level` is above info.
    """
    plain = log_to_stderr(level)
    wanted = logging.getLogger().isEnabledFor(logging.INFO)
    return RequestLog(sys.stderr.buffer, plain=plain) if wanted else None
