"""What one request adds to the metrics: at its plan, and the parts of its time. Pure arithmetic.

The time to the first token is told apart into parts that follow each other on the request's way.
Where legs overlap, each moment belongs to the earliest part that has not ended, so that the parts
always add up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvrouter.engines.engine import Engine
    from kvrouter.routing.plan import RouteInputs
    from kvrouter.serving.request.context import RequestContext, Timing
    from kvrouter.telemetry.metrics import Metrics
    from kvrouter.telemetry.tracing.trace import Trace


Parts = tuple[float, float, float, float, float, float]


def parts_of(timing: Timing, until_s: float) -> Parts:
    """Seconds of each of `PARTS` from the request's arrival until `until_s`; their sum is all.

    Args:
        timing: of the request.
        until_s: its first byte, or its end where it had none; on the monotonic clock.
    """
    waited_s, tokenising_s = timing.waited_s, timing.tokenising_s
    planned_s = min(timing.planned_s or until_s, until_s)
    prefilled_s = min(max(timing.prefilled_s, planned_s), until_s)
    landed_s = min(max(timing.landed_s, prefilled_s), until_s)
    return (
        waited_s,
        tokenising_s,
        planned_s - timing.started_s - waited_s - tokenising_s,
        prefilled_s - planned_s,
        landed_s - prefilled_s,
        until_s - landed_s,
    )


def note_plan(context: RequestContext, inputs: RouteInputs, metrics: Metrics) -> None:
    """Count the plan of a prompt, and the prompt's tokens by where their KV was.

    Sets `Route.hit_engine` and `Route.hit_store`.
    """
    plan = context.route.plan
    assert plan is not None
    engine, store = hits(inputs, plan.decode)
    context.route.hit_engine, context.route.hit_store = engine, store
    metrics.overhead.observe(context.timing.planned_s - context.timing.started_s)
    metrics.plans[plan.why] += 1
    metrics.prompt_tokens[()] += inputs.prompt_tokens
    if engine:
        metrics.hit_tokens["engine"] += engine
    if store:
        metrics.hit_tokens["store"] += store
    if inputs.prompt_tokens > engine + store:
        metrics.hit_tokens["none"] += inputs.prompt_tokens - engine - store
    if context.trace is not None:
        _trace_plan(context, context.trace)


def hits(inputs: RouteInputs, decode: Engine) -> tuple[int, int]:
    """Leading tokens of the prompt that `decode` holds, and tokens beyond these in the store."""
    own = inputs.matches.get(decode, 0) if inputs.matches else 0
    manifest = decode.manifest if inputs.store_blocks else None
    stored = inputs.store_blocks.get(manifest, 0) if manifest is not None else 0
    return own * inputs.block_tokens, max(stored - own, 0) * inputs.block_tokens


def ms(seconds: float) -> float:
    """Milliseconds as the log has them, to a microsecond."""
    return int(seconds * 1e6 + 0.5) / 1000  # a fifth of what round() to 3 digits takes


def _trace_plan(context: RequestContext, trace: Trace) -> None:
    """A span for the plan, from what came before it; parsing is told with it."""
    assert context.route.plan is not None
    begun_s = max((span.ended_s for span in trace.spans[1:]), default=context.timing.started_s)
    found: dict[str, str | int] = {
        "kvrouter.plan": context.route.plan.why,
        "kvrouter.hit_engine_tokens": context.route.hit_engine,
        "kvrouter.hit_store_tokens": context.route.hit_store,
    }
    trace.note("kvrouter.plan", begun_s, context.timing.planned_s, found)
