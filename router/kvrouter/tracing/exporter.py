"""Sends traces in batches from a thread of its own, so that no request waits for a collector.

What a collector that is dead or slow does not take is dropped and counted.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvrouter.tracing.trace import Trace

MAX_TRACES: Final = 4096
"""Traces that wait to be sent at most; about 10 KiB each."""
BATCH_TRACES: Final = 512
"""Traces that are sent together at most."""
GATHER_S: Final = 1.0
"""How long traces are gathered where they are fewer."""

log = logging.getLogger(__name__)


class Exporter:
    """Traces on their way to a collector. `close` ends its thread.

    Args:
        send: sends traces, in the exporter's thread; whether the collector took them. It may take
            its time and must not raise.
        where: the collector, as the log names it.
        gather_s: how long traces are gathered.
    """

    def __init__(
        self, send: Callable[[list[Trace]], bool], where: str, gather_s: float = GATHER_S
    ) -> None:
        self._send = send
        self._where = where
        self._gather_s = gather_s
        self._queue: deque[Trace] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._taken = True
        self._overflowed = 0  # counted by the loop; the others by the thread
        self._exported = 0
        self._refused = 0
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def take(self, trace: Trace) -> None:
        """Have `trace` sent; dropped where too many wait."""
        waiting = len(self._queue)
        if waiting >= MAX_TRACES or self._closing:
            self._overflowed += len(trace.spans)
            return
        self._queue.append(trace)
        if waiting + 1 == BATCH_TRACES:
            self._wake.set()

    def counts(self) -> Iterator[tuple[tuple[str, ...], float]]:
        """Spans by outcome, for a metric."""
        yield ("exported",), float(self._exported)
        yield ("dropped",), float(self._overflowed + self._refused)

    def close(self, timeout_s: float) -> None:
        """Send what waits, within `timeout_s`; blocks as long. Idempotent."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._closing:
            full = self._wake.wait(self._gather_s)
            self._wake.clear()
            waiting = len(self._queue)
            self._send_oldest(waiting - waiting % BATCH_TRACES if full else waiting)
        self._send_oldest(len(self._queue))

    def _send_oldest(self, count: int) -> None:
        """Send so many; those that come meanwhile are gathered for the next batch."""
        for begin in range(0, count, BATCH_TRACES):
            batch = [self._queue.popleft() for _ in range(min(BATCH_TRACES, count - begin))]
            spans = sum(len(trace.spans) for trace in batch)
            taken = self._send(batch)
            if taken:
                self._exported += spans
            else:
                self._refused += spans
            if taken != self._taken:
                self._taken = taken
                self._tell()

    def _tell(self) -> None:
        if self._taken:
            log.info("traces: %s takes spans again", self._where)
        else:
            log.warning(
                "traces: %s takes no spans; they are dropped and counted "
                "(kvrouter:trace_spans_total)",
                self._where,
            )
