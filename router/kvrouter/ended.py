"""Requests that have ended, until they are counted and logged: a few together, and soon.

What a request leaves to be done is the same each time. Done at its end, its code is fetched anew
amid what the kernel and other requests left in the processor's caches; done for many in a row it is
there already (benchmarks/overhead.py).
"""

from __future__ import annotations

import asyncio
from time import monotonic, time
from typing import TYPE_CHECKING, Final

from kvrouter.account import FINISH_REASONS, NOT_WELL, ms, parts_of
from kvrouter.log import FLUSH_S, Line
from kvrouter.tracing.attributes import end_request

if TYPE_CHECKING:
    from kvrouter.account import Parts
    from kvrouter.log import RequestLog
    from kvrouter.metrics import Metrics
    from kvrouter.passage import Passage
    from kvrouter.tracing.trace import Tracing

_TOGETHER: Final = 16
_BODY_BYTES: Final = 1 << 16
"""A request with a larger body does not wait: those that do hold a MiB of bodies at most."""
_MODEL: Final = 200
"""Characters of a model's name in a line: a client may ask for any."""


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
        """Count and trace those that wait, and give their lines to the log."""
        waiting, self._waiting = self._waiting, []
        since_1970_s = time() - monotonic()
        for passage, now_s in waiting:
            parts = parts_of(passage, passage.first_s or now_s)
            status = 499 if passage.outcome == "client_left" else passage.exchange.status
            self._count(passage, status, parts, now_s)
            if self._log is not None:
                self._log.write(line_of(passage, status, parts, now_s, since_1970_s + now_s))
            if self._tracing is not None and passage.trace is not None:
                end_request(passage, passage.trace.request, parts, now_s)
                self._tracing.take(passage.trace)

    def _count(self, passage: Passage, status: int, parts: Parts, now_s: float) -> None:
        metrics = self._metrics
        metrics.generation_tokens[()] += passage.generated  # also of those that broke off
        if status != 200 or passage.outcome in NOT_WELL:
            metrics.errors[str(status)] += 1
            return
        known = passage.outcome in FINISH_REASONS
        metrics.success[passage.outcome if known else "other"] += 1
        metrics.e2e.observe(now_s - passage.started_s)
        metrics.ttft.observe((passage.first_s or now_s) - passage.started_s)
        metrics.ttft_parts.observe(parts)


def line_of(passage: Passage, status: int, parts: Parts, now_s: float, at_s: float) -> Line:
    """The log line of a request that ended at `now_s` (monotonic), `at_s` (since 1970)."""
    exchange, request, plan = passage.exchange, passage.request, passage.plan
    queue_s, tokenise_s, plan_s, prefill_s, landing_s, decode_s = parts
    return Line(
        request_id=passage.request_id,
        key=exchange.caller.name if exchange.caller is not None else None,
        trace_id=passage.trace.hex_id if passage.trace is not None else None,
        status=status,
        outcome=passage.outcome,
        path=exchange.path,
        client=exchange.peer,
        model=request.model[:_MODEL] if request is not None and request.model else None,
        stream=request.stream if request is not None else None,
        prompt_tokens=request.prompt_tokens if request is not None else None,
        hit_engine_tokens=passage.hit_engine,
        hit_store_tokens=passage.hit_store,
        cached_tokens=passage.cached_tokens,
        generated=passage.generated,
        plan=plan.why if plan is not None else None,
        prefill=passage.prefill_engine,
        decode=passage.decode_engine,
        attempts=passage.attempts,
        shares=len(passage.shares) if passage.shares else None,
        landed_blocks=passage.landed_blocks,
        queue_ms=ms(queue_s),
        tokenise_ms=ms(tokenise_s),
        plan_ms=ms(plan_s),
        prefill_ms=ms(prefill_s),
        landing_ms=ms(landing_s),
        decode_ms=ms(decode_s),
        ttft_ms=ms(passage.first_s - passage.started_s) if passage.first_s else None,
        total_ms=ms(now_s - passage.started_s),
        error=passage.error,
        time=round(at_s, 3),
    )
