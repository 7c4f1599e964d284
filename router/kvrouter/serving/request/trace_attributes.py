"""What the spans of a request and of its parts say.

Names are vLLM's and OpenTelemetry's (`gen_ai.*`, vllm/tracing/utils.py), llm-d's for what only a
proxy of both legs knows (`llm_d.pd_proxy.*`), and `kvrouter.*` for the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import orjson

from kvrouter.openai.request import UNREAD, Request
from kvrouter.serving.request.summary import prompt_tokens

if TYPE_CHECKING:
    from kvrouter.routing.plan import Plan
    from kvrouter.serving.request.context import RequestContext
    from kvrouter.serving.request.summary import Parts
    from kvrouter.telemetry.tracing.trace import Attributes, Span, Trace

_OPERATIONS: Final = {"completion": "text_completion", "chat": "chat"}
_MAX_CHARS: Final = 500
_ASKED: Final = ("temperature", "top_p")


def note_plan_span(context: RequestContext, plan: Plan, trace: Trace) -> None:
    """Note a span for the plan; it begins with the end of what was noted before it."""
    begun_s = max((span.ended_s for span in trace.spans[1:]), default=context.timing.started_s)
    found: dict[str, str | int | float] = {
        "kvrouter.plan": plan.why,
        "kvrouter.predicted_s": plan.predicted_s,
        "kvrouter.hit_engine_tokens": context.route.hit_engine,
        "kvrouter.hit_lower_tokens": context.route.hit_lower,
        "kvrouter.hit_store_tokens": context.route.hit_store,
    }
    trace.note("kvrouter.plan", begun_s, context.timing.planned_s, found)


def end_decode(context: RequestContext, span: Span) -> None:
    """End the span of a decode leg; it says when the leg's first byte came, if one did."""
    first_s = context.timing.first_s
    if first_s:
        span.attributes["kvrouter.first_byte_ms"] = (first_s - span.begun_s) * 1000
    span.end()
    if context.outcome.reason == "broken":
        span.error = span.error or context.outcome.error


def end_request(context: RequestContext, span: Span, parts: Parts, now_s: float) -> None:
    """Fill the span of a request that has ended."""
    span.ended_s = now_s
    span.attributes = {**_answer(context), **_times(context, parts, now_s)}
    if context.request is not UNREAD:
        span.attributes.update(_request(context.request))
        span.attributes["gen_ai.usage.prompt_tokens"] = prompt_tokens(context)
    if context.status >= 500 or context.outcome.reason == "broken":
        span.error = (context.outcome.error or context.outcome.reason)[:_MAX_CHARS]


def end_passed_through(context: RequestContext, span: Span, status: int, now_s: float) -> None:
    """Fill the span of a request that one engine answered."""
    found: dict[str, str | int | None] = {
        "http.request.method": context.exchange.method,
        "url.path": context.exchange.path,
        "http.response.status_code": status,
        "gen_ai.request.id": context.request_id,
        "gen_ai.request.model": context.alias or context.model or None,
        "gen_ai.response.model": context.model or None,
        "kvrouter.decode_engine": context.route.decode_engine,
        "kvrouter.attempts": context.route.attempts,
    }
    span.attributes = {name: value for name, value in found.items() if value is not None}
    span.ended_s = now_s
    if status >= 500:
        span.error = (context.outcome.error or str(status))[:_MAX_CHARS]


def _answer(context: RequestContext) -> Attributes:
    exchange = context.exchange
    found: dict[str, str | int | tuple[str, ...] | None] = {
        "http.request.method": exchange.method,
        "url.path": exchange.path,
        "http.response.status_code": context.status or None,
        "gen_ai.request.id": context.request_id,
        "gen_ai.response.model": context.model[:_MAX_CHARS] or None,
        "gen_ai.response.finish_reasons": (context.outcome.reason,),
        "gen_ai.usage.completion_tokens": context.outcome.generated,
        "kvrouter.outcome": context.outcome.reason,
        "kvrouter.plan": context.why,
        "kvrouter.prefill_engine": context.route.prefill_engine,
        "kvrouter.decode_engine": context.route.decode_engine,
        "kvrouter.attempts": context.route.attempts,
        "kvrouter.shares": len(context.shares) if context.shares else None,
        "kvrouter.hit_engine_tokens": context.route.hit_engine,
        "kvrouter.hit_lower_tokens": context.route.hit_lower,
        "kvrouter.hit_store_tokens": context.route.hit_store,
        "kvrouter.cached_tokens": context.route.cached_tokens,
        "kvrouter.landed_blocks": context.route.landed_blocks,
        "kvrouter.nothing_landed": context.route.nothing_landed,
        "kvrouter.error": context.outcome.error[:_MAX_CHARS] if context.outcome.error else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _times(context: RequestContext, parts: Parts, now_s: float) -> Attributes:
    total_s = now_s - context.timing.started_s
    queue_s, _, _, prefill_s, landing_s, _ = parts
    found: Attributes = {
        "gen_ai.latency.time_in_queue": queue_s,
        "gen_ai.latency.e2e": total_s,
        "llm_d.pd_proxy.total_duration_ms": total_s * 1000,
        "llm_d.pd_proxy.prefill_duration_ms": prefill_s * 1000,
        "llm_d.pd_proxy.coordinator_overhead_ms": landing_s * 1000,
    }
    if context.timing.first_s:
        ttft_s = context.timing.first_s - context.timing.started_s
        found["gen_ai.latency.time_to_first_token"] = ttft_s
        found["llm_d.pd_proxy.true_ttft_ms"] = ttft_s * 1000
        decode_ms = (now_s - context.timing.first_s + parts[-1]) * 1000
        found["llm_d.pd_proxy.decode_duration_ms"] = decode_ms
    return found


def _request(request: Request) -> Attributes:
    found: Attributes = {
        "gen_ai.operation.name": _OPERATIONS[request.kind],
        "gen_ai.request.n": request.n,
        "kvrouter.stream": request.stream,
    }
    if request.model is not None:
        found["gen_ai.request.model"] = request.model[:_MAX_CHARS]
    if request.max_tokens is not None:
        found["gen_ai.request.max_tokens"] = request.max_tokens
    for name in _ASKED:
        raw = request.raw(name)
        value = orjson.loads(raw) if raw is not None and len(raw) < 32 else None
        if isinstance(value, int | float):
            found[f"gen_ai.request.{name}"] = float(value)
    return found
