"""Counts, traces and logs requests that have ended: a few together, and soon.

What a request leaves to be done is the same each time. At the end of each request its code would
have to be fetched again, because the kernel and other requests have filled the processor's caches;
for several in a row it is there already.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from time import monotonic, time
from typing import TYPE_CHECKING, Final

from kvrouter.access.callers import caller_of
from kvrouter.fates.split import Evidence, count_fates
from kvrouter.openai.request import UNREAD
from kvrouter.serving.request.summary import Parts, ms, parts_of, prompt_tokens, usage_of
from kvrouter.serving.request.trace_attributes import end_passed_through, end_request
from kvrouter.telemetry.metrics import FINISH_REASONS, NOT_WELL, Metrics
from kvrouter.telemetry.request_log import FLUSH_S, RequestLine, RequestLog

if TYPE_CHECKING:
    from kvrouter.fates.recent import Recent
    from kvrouter.serving.recording import Recorder
    from kvrouter.serving.request.context import RequestContext
    from kvrouter.serving.request.evidence import Witness
    from kvrouter.telemetry.by_model import ModelMetrics
    from kvrouter.telemetry.tracing.trace import Tracing

log = logging.getLogger(__name__)

_TOGETHER: Final = 16
_BODY_BYTES: Final = 1 << 16
"""A request with a larger body does not wait: those that do hold a MiB of bodies at most."""
_MODEL: Final = 200  # characters of a model's name in a line: a client may ask for any


@dataclass(eq=False)
class Settler:
    """Takes requests that have ended; a scrape, a full list or a fifth of a second settles them."""

    metrics: Metrics  # counts and times them; asks for settlement before a scrape
    log: RequestLog | None  # takes a line for each, or None
    tracing: Tracing | None  # takes the traces of those that have one
    recorder: Recorder | None = None  # takes those for text
    witness: Witness | None = None  # tells what became of prompt tokens; None: nobody asks
    recent: Recent | None = None  # remembers that; None: nobody asks

    def __post_init__(self) -> None:
        self._waiting: list[tuple[RequestContext, float]] = []
        self._soon = False  # whether a timer runs
        self.metrics.settle = self.settle

    def take(self, context: RequestContext, now_s: float) -> None:
        """`context` ended then, on the monotonic clock; it does not change any more."""
        waiting = self._waiting
        waiting.append((context, now_s))
        if len(waiting) >= _TOGETHER or len(context.exchange.body) > _BODY_BYTES:
            self.settle()
        elif not self._soon:
            self._soon = True
            asyncio.get_running_loop().call_later(FLUSH_S, self._settle_late)

    def _settle_late(self) -> None:
        self._soon = False
        self.settle()

    def settle(self) -> None:
        """Count and trace those that wait, and give their lines to the log. Raises nothing.

        One that cannot be settled is lost alone: whoever calls has nothing to do with it.
        """
        waiting, self._waiting = self._waiting, []
        since_1970_s = time() - monotonic()
        for context, now_s in waiting:
            try:
                self._take_up(context, now_s, since_1970_s + now_s)
            except Exception:
                log.exception("request %s is not counted or logged", context.request_id)

    def _take_up(self, context: RequestContext, now_s: float, at_s: float) -> None:
        endpoint, parts, known = context.endpoint, None, list[Evidence]()
        status = 499 if context.outcome.reason == "client_left" else context.status
        model, caller = self.metrics.of(context.model), caller_of(context.exchange)
        if endpoint is not None:
            self.metrics.passed_through[endpoint.path, str(status), model.label] += 1
        model.generation_tokens += context.outcome.generated  # also of those that broke off
        if caller is not None:
            caller.use(model.label, *usage_of(context))
        if endpoint is None or endpoint.generates:  # a request for text
            parts = parts_of(context.timing, context.timing.first_s or now_s)
            self._count(context, model, status, parts, now_s)
            known = self._known(context)
        fates, recent = count_fates(known, model.fates), self.recent if known else None
        if self.log is not None or recent is not None:
            line = line_of(context, status, parts, now_s, at_s)
            line.fates = fates
            if recent is not None:
                recent.add(line, context.request, context.exchange.headers, known)
            if self.log is not None:
                self.log.write(line)
        if self.tracing is not None and context.trace is not None:
            if parts is not None:
                end_request(context, context.trace.request, parts, now_s)
            else:
                end_passed_through(context, context.trace.request, status, now_s)
            self.tracing.take(context.trace)
        if self.recorder is not None and parts is not None:
            self.recorder.take(context, now_s)

    def _known(self, context: RequestContext) -> list[Evidence]:
        """What is known of each prompt of a request."""
        witness, units = self.witness, context.shares or (context,)
        return [known for unit in units if witness and (known := witness.evidence(unit))]

    def _count(
        self, context: RequestContext, model: ModelMetrics, status: int, parts: Parts, now_s: float
    ) -> None:
        metrics, timing, reason = self.metrics, context.timing, context.outcome.reason
        if status != 200 or reason in NOT_WELL:
            metrics.errors[str(status), model.label] += 1
            return
        metrics.success[reason if reason in FINISH_REASONS else "other", model.label] += 1
        model.e2e.observe(now_s - timing.started_s)
        model.ttft.observe((timing.first_s or now_s) - timing.started_s)
        metrics.ttft_parts.observe(parts)


def line_of(
    context: RequestContext, status: int, parts: Parts | None, now_s: float, at_s: float
) -> RequestLine:
    """The log line of a request that ended at `now_s` (monotonic), `at_s` (since 1970).

    One for no text, which one engine answered, has no plan and no parts.
    """
    exchange, outcome, caller = context.exchange, context.outcome, caller_of(context.exchange)
    line = RequestLine(
        request_id=context.request_id,
        key=caller.name if caller is not None else None,
        trace_id=context.trace.hex_id if context.trace is not None else None,
        status=status,
        outcome=outcome.reason if outcome.reason != "unknown" else None,
        path=exchange.path[:_MODEL],
        client=exchange.peer,
        model=(context.alias or context.model)[:_MODEL] or None,
        version=context.model if context.alias is not None else None,
        decode=context.route.decode_engine,
        attempts=context.route.attempts,
        total_ms=ms(now_s - context.timing.started_s),
        error=outcome.error,
        time=round(at_s, 3),
    )
    if parts is not None:
        _fill_in(line, context, parts)
    return line


def _fill_in(line: RequestLine, context: RequestContext, parts: Parts) -> None:
    """What else there is to say of a request for text."""
    request, route, timing = context.request, context.route, context.timing
    line.model = request.model[:_MODEL] if request.model else None
    if request is not UNREAD:
        line.stream, line.prompt_tokens = request.stream, prompt_tokens(context)
    line.hit_engine_tokens, line.hit_lower_tokens = route.hit_engine, route.hit_lower
    line.hit_store_tokens = route.hit_store
    line.cached_tokens, line.generated = route.cached_tokens, context.outcome.generated
    line.plan = context.why
    if route.plan is not None and route.plan.predicted_s:
        line.predicted_ms = ms(route.plan.predicted_s)
    line.prefill = route.prefill_engine
    if context.shares:
        line.shares = len(context.shares)
    line.landed_blocks, line.nothing_landed = route.landed_blocks, route.nothing_landed
    queue_s, tokenise_s, plan_s, prefill_s, landing_s, decode_s = parts
    line.queue_ms, line.tokenise_ms, line.plan_ms = ms(queue_s), ms(tokenise_s), ms(plan_s)
    line.prefill_ms, line.landing_ms, line.decode_ms = ms(prefill_s), ms(landing_s), ms(decode_s)
    if timing.first_s:
        line.ttft_ms = ms(timing.first_s - timing.started_s)
