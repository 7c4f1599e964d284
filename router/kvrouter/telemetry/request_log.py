"""One log line per request: JSON in a pipe, plain text on a terminal.

Lines are encoded and written together a few times per second, so that a request costs no system
call. A slow reader of the log delays no request (`kvrouter_store.log.LogWriter`).
"""

from __future__ import annotations

import asyncio
import logging
from time import time
from typing import TYPE_CHECKING, Final, Protocol

from msgspec import Struct
from msgspec.json import Encoder
from msgspec.structs import asdict, replace

from kvrouter_store.log import LogWriter, cut, log_to_stderr

if TYPE_CHECKING:
    from collections.abc import Sequence


FLUSH_S: Final = 0.2
_HELD_LINES: Final = 128
_ENCODE: Final = Encoder().encode_lines


class RequestLine(Struct, omit_defaults=True, gc=False):
    """The outcome of one request; its line leaves out fields without a value.

    docs/observability.md explains the fields.
    """

    request_id: str
    key: str | None = None
    trace_id: str | None = None
    status: int | None = None
    outcome: str | None = None
    path: str | None = None
    client: str | None = None
    model: str | None = None
    version: str | None = None
    stream: bool | None = None
    prompt_tokens: int | None = None
    hit_engine_tokens: int | None = None
    hit_lower_tokens: int | None = None
    hit_store_tokens: int | None = None
    cached_tokens: int | None = None
    fates: dict[str, int] | None = None
    generated: int | None = None
    plan: str | None = None
    predicted_ms: float | None = None
    prefill: str | None = None
    decode: str | None = None
    attempts: int | None = None
    shares: int | None = None
    landed_blocks: int | None = None
    nothing_landed: str | None = None
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


class Output(Protocol):
    """Takes encoded lines without blocking."""

    def write(self, lines: bytes, /) -> object:
        """Take whole lines."""


class RequestLog:
    """Writes the lines of requests as JSON, or plain as `key=value`."""

    def __init__(self, output: Output, *, plain: bool) -> None:
        self._output = output
        self._encode = _plain if plain else _json
        self._held: list[RequestLine] = []
        self._timer: asyncio.TimerHandle | None = None

    def write(self, line: RequestLine) -> None:
        """Write `line` soon; sets its time if it has none."""
        if line.time is None:
            line.time = round(time(), 3)
        if line.error is not None:
            line.error = cut(line.error)
        self._held.append(line)
        if len(self._held) >= _HELD_LINES:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        """Encode the waiting lines and write them."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        held, self._held = self._held, []
        if held:
            self._output.write(self._encode(held))


def _json(lines: Sequence[RequestLine]) -> bytes:
    try:
        return _ENCODE(lines)
    except UnicodeEncodeError:  # a lone surrogate
        return _ENCODE([encodable(line) for line in lines])


def encodable(line: RequestLine) -> RequestLine:
    """`line` with `?` in place of characters that UTF-8 cannot encode."""
    texts = {
        name: value.encode("utf-8", "replace").decode()
        for name, value in asdict(line).items()
        if isinstance(value, str)
    }
    return replace(line, **texts)


def _plain(lines: Sequence[RequestLine]) -> bytes:
    """`lines` as `key=value`, for people."""
    fields = (asdict(line).items() for line in lines)
    text = (" ".join(f"{k}={v}" for k, v in pairs if v is not None) for pairs in fields)
    return "".join(f"{line}\n" for line in text).encode("utf-8", "replace")


def set_up(level: str, form: str = "auto") -> tuple[RequestLog | None, LogWriter]:
    """Configure `logging` to stderr, see `log_to_stderr`.

    Returns:
        the log of requests, None if `level` is above info; and the writer of both logs.
    """
    writer, plain = log_to_stderr(level, form)
    wanted = logging.getLogger().isEnabledFor(logging.INFO)
    return RequestLog(writer, plain=plain) if wanted else None, writer
