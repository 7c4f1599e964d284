"""Requests that have ended, until they are counted and logged: a few together, and soon.

Those that were planned meanwhile are counted with them.

What a request leaves to be done is the same each time. Done at its end, its code is fetched anew
amid what the kernel and other requests left in the processor's caches; done for many in a row it is
there already (benchmarks/overhead.py).
"""

from __future__ import annotations

import asyncio
from time import monotonic, time
from typing import TYPE_CHECKING, Final

from kvrouter._native import Settler
from kvrouter.account import NOT_WELL, parts_of
from kvrouter.log import FLUSH_S
from kvrouter.tracing.attributes import end_request

if TYPE_CHECKING:
    from kvrouter.log import RequestLog
    from kvrouter.metrics import Metrics
    from kvrouter.passage import Passage
    from kvrouter.tracing.trace import Tracing

_TOGETHER: Final = 16
_BODY_BYTES: Final = 1 << 16
"""A request with a larger body does not wait: those that do hold a MiB of bodies at most."""


class Ended:
    """Takes requests that have ended; a scrape, a full list or a fifth of a second settles them.

    Args:
        metrics: counts and times them; tells of a scrape.
        log: takes a line for each, or None.
        tracing: takes the traces of those that have one.
    """

    def __init__(self, metrics: Metrics, log: RequestLog | None, tracing: Tracing | None) -> None:
        self._metrics = metrics
        self._log = log
        self._tracing = tracing
        self._settle = Settler(
            *(metrics.e2e.buckets, metrics.ttft.buckets, metrics.ttft_parts.buckets),
            *(metrics.success, metrics.errors, metrics.generation_tokens),
            *(NOT_WELL, log.lines if log is not None else None),
        ).settle
        self._waiting: list[tuple[Passage, float]] = []
        self._soon = False  # whether a timer runs
        metrics.settle = self.settle

    def take(self, passage: Passage, now_s: float) -> None:
        """`passage` ended then, on the monotonic clock; nobody changes it any more."""
        waiting = self._waiting
        waiting.append((passage, now_s))
        if len(waiting) >= _TOGETHER or len(passage.exchange.body) > _BODY_BYTES:
            self.settle()
        elif not self._soon:
            self._soon = True
            asyncio.get_running_loop().call_later(FLUSH_S, self._settle_late)

    def _settle_late(self) -> None:
        self._soon = False
        self.settle()

    def settle(self) -> None:
        """Count and trace those that wait, and have their lines written."""
        self._metrics.count_plans()
        waiting, self._waiting = self._waiting, []
        traced = self._settle(waiting, time() - monotonic())
        if self._tracing is not None:
            for passage, now_s in traced:
                self._trace(passage, now_s, self._tracing)
        if self._log is not None:
            self._log.written()

    def _trace(self, passage: Passage, now_s: float, tracing: Tracing) -> None:
        trace = passage.trace
        assert trace is not None
        end_request(passage, trace.request, parts_of(passage, passage.first_s or now_s), now_s)
        tracing.take(trace)
