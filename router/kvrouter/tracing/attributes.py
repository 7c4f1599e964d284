"""What the span of a request says at its end.

Names are vLLM's and OpenTelemetry's (`gen_ai.*`, vllm/tracing/utils.py), llm-d's for what only a
proxy of both legs knows (`llm_d.pd_proxy.*`), and `kvrouter.*` for the rest.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Final

import orjson

if TYPE_CHECKING:
    from kvrouter.account import Parts
    from kvrouter.openai import Request
    from kvrouter.passage import Passage
    from kvrouter.passthrough import Visit
    from kvrouter.tracing.trace import Attributes, Span

_OPERATIONS: Final = {"completion": "text_completion", "chat": "chat"}
_MAX_CHARS: Final = 500
_ASKED: Final = ("temperature", "top_p")


def end_request(passage: Passage, span: Span, parts: Parts, now_s: float) -> None:
    """Fill the span of a request that has ended."""
    span.ended_s = now_s
    span.attributes = {**_answer(passage), **_times(passage, parts, now_s)}
    if passage.request is not None:
        span.attributes.update(_request(passage.request))
    status = passage.exchange.status
    if status >= 500 or passage.outcome == "broken":
        span.error = (passage.error or passage.outcome)[:_MAX_CHARS]


def end_visit(visit: Visit, span: Span, status: int) -> None:
    """Fill the span of a request that one engine answered."""
    found: dict[str, str | int | None] = {
        "http.request.method": visit.exchange.method,
        "url.path": visit.endpoint.path,
        "http.response.status_code": status,
        "gen_ai.request.id": visit.request_id,
        "gen_ai.request.model": visit.model,
        "kvrouter.decode_engine": visit.engine,
        "kvrouter.attempts": visit.attempts,
    }
    span.attributes = {name: value for name, value in found.items() if value is not None}
    span.ended_s = monotonic()
    if status >= 500:
        span.error = (visit.error or str(status))[:_MAX_CHARS]


def _answer(passage: Passage) -> Attributes:
    exchange, plan = passage.exchange, passage.plan
    found: dict[str, str | int | tuple[str, ...] | None] = {
        "http.request.method": exchange.method,
        "url.path": exchange.path,
        "http.response.status_code": exchange.status or None,
        "gen_ai.request.id": passage.request_id,
        "gen_ai.response.finish_reasons": (passage.outcome,),
        "gen_ai.usage.completion_tokens": passage.generated,
        "kvrouter.outcome": passage.outcome,
        "kvrouter.plan": plan.why if plan is not None else None,
        "kvrouter.prefill_engine": passage.prefill_engine,
        "kvrouter.decode_engine": passage.decode_engine,
        "kvrouter.attempts": passage.attempts,
        "kvrouter.shares": len(passage.shares) if passage.shares else None,
        "kvrouter.hit_engine_tokens": passage.hit_engine,
        "kvrouter.hit_store_tokens": passage.hit_store,
        "kvrouter.cached_tokens": passage.cached_tokens,
        "kvrouter.landed_blocks": passage.landed_blocks,
        "kvrouter.error": passage.error[:_MAX_CHARS] if passage.error else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _times(passage: Passage, parts: Parts, now_s: float) -> Attributes:
    total_s = now_s - passage.started_s
    queue_s, _, _, prefill_s, landing_s, _ = parts
    found: Attributes = {
        "gen_ai.latency.time_in_queue": queue_s,
        "gen_ai.latency.e2e": total_s,
        "llm_d.pd_proxy.total_duration_ms": total_s * 1000,
        "llm_d.pd_proxy.prefill_duration_ms": prefill_s * 1000,
        "llm_d.pd_proxy.coordinator_overhead_ms": landing_s * 1000,
    }
    if passage.first_s:
        ttft_s = passage.first_s - passage.started_s
        found["gen_ai.latency.time_to_first_token"] = ttft_s
        found["llm_d.pd_proxy.true_ttft_ms"] = ttft_s * 1000
        decode_ms = (now_s - passage.first_s + parts[-1]) * 1000
        found["llm_d.pd_proxy.decode_duration_ms"] = decode_ms
    return found


def _request(request: Request) -> Attributes:
    found: Attributes = {
        "gen_ai.operation.name": _OPERATIONS[request.kind],
        "gen_ai.usage.prompt_tokens": request.prompt_tokens,
        "gen_ai.request.n": request.n,
        "kvrouter.stream": request.stream,
    }
    if request.model is not None:
        found["gen_ai.request.model"] = found["gen_ai.response.model"] = request.model[:_MAX_CHARS]
    if request.max_tokens is not None:
        found["gen_ai.request.max_tokens"] = request.max_tokens
    for name in _ASKED:
        raw = request.raw(name)
        value = orjson.loads(raw) if raw is not None and len(raw) < 32 else None
        if isinstance(value, int | float):
            found[f"gen_ai.request.{name}"] = float(value)
    return found
