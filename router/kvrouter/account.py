"""What one request adds to the metrics: at its plan, and the parts of its time. Pure arithmetic.

The time to the first token is told apart into parts that follow each other on the request's way.
Where legs overlap, each moment belongs to the earliest part that has not ended, so that the parts
always add up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvrouter.engine import Engine
    from kvrouter.metrics import Metrics
    from kvrouter.passage import Passage
    from kvrouter.plan import RouteInputs
    from kvrouter.tracing.trace import Trace

PARTS: Final = ("queue", "tokenise", "plan", "prefill", "landing", "decode")
"""Parts of the time to the first token, in their order."""
NOT_WELL: Final = frozenset({"broken", "client_left", "cut_off", "error", "refused"})
"""Outcomes of requests that were not answered well."""

FINISH_REASONS: Final = frozenset(
    {
        *("stop", "length", "abort", "repetition"),  # vLLM, vllm/v1/engine/__init__.py
        *("tool_calls", "function_call", "content_filter"),  # OpenAI
        "unknown",  # none was told
    }
)
"""Finish reasons that are counted by their name; what else engines say counts as "other"."""

Parts = tuple[float, float, float, float, float, float]


def parts_of(passage: Passage, until_s: float) -> Parts:
    """Seconds of each of `PARTS` from the request's arrival until `until_s`; their sum is all.

    Args:
        passage: the request.
        until_s: its first byte, or its end where it had none; on the monotonic clock.
    """
    waited_s, tokenising_s = passage.waited_s, passage.tokenising_s
    planned_s = min(passage.planned_s or until_s, until_s)
    prefilled_s = min(max(passage.prefilled_s, planned_s), until_s)
    landed_s = min(max(passage.landed_s, prefilled_s), until_s)
    return (
        waited_s,
        tokenising_s,
        planned_s - passage.started_s - waited_s - tokenising_s,
        prefilled_s - planned_s,
        landed_s - prefilled_s,
        until_s - landed_s,
    )


def note_plan(passage: Passage, inputs: RouteInputs, metrics: Metrics) -> None:
    """Count the plan of a prompt, and the prompt's tokens by where their KV was.

    Sets `Passage.hit_engine` and `Passage.hit_store`.
    """
    plan = passage.plan
    assert plan is not None
    engine, store = hits(inputs, plan.decode)
    passage.hit_engine, passage.hit_store = engine, store
    metrics.overhead.observe(passage.planned_s - passage.started_s)
    metrics.plans[plan.why] += 1
    metrics.prompt_tokens[()] += inputs.prompt_tokens
    if engine:
        metrics.hit_tokens["engine"] += engine
    if store:
        metrics.hit_tokens["store"] += store
    if inputs.prompt_tokens > engine + store:
        metrics.hit_tokens["none"] += inputs.prompt_tokens - engine - store
    if passage.trace is not None:
        _trace_plan(passage, passage.trace)


def hits(inputs: RouteInputs, decode: Engine) -> tuple[int, int]:
    """Leading tokens of the prompt that `decode` holds, and tokens beyond these in the store."""
    own = inputs.matches.get(decode, 0) if inputs.matches else 0
    manifest = decode.manifest if inputs.store_blocks else None
    stored = inputs.store_blocks.get(manifest, 0) if manifest is not None else 0
    return own * inputs.block_tokens, max(stored - own, 0) * inputs.block_tokens


def ms(seconds: float) -> float:
    """Milliseconds as the log has them, to a microsecond."""
    return int(seconds * 1e6 + 0.5) / 1000  # a fifth of what round() to 3 digits takes


def _trace_plan(passage: Passage, trace: Trace) -> None:
    """A span for the plan, from what came before it; parsing is told with it."""
    assert passage.plan is not None
    begun_s = max((span.ended_s for span in trace.spans[1:]), default=passage.started_s)
    found: dict[str, str | int] = {
        "kvrouter.plan": passage.plan.why,
        "kvrouter.hit_engine_tokens": passage.hit_engine,
        "kvrouter.hit_store_tokens": passage.hit_store,
    }
    trace.note("kvrouter.plan", begun_s, passage.planned_s, found)
