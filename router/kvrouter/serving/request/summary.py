"""What a request took and used, as times, tokens and money are counted. Pure arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvrouter.serving.request.context import RequestContext, Timing

Parts = tuple[float, float, float, float, float, float]
"""Seconds of each of `PARTS`. Where legs overlap, each moment belongs to the earliest part that has
not ended, so that the parts always add up."""


def parts_of(timing: Timing, until_s: float) -> Parts:
    """Seconds of each of `PARTS` from the request's arrival until `until_s`; their sum is all.

    Args:
        timing: of the request.
        until_s: its first byte, or its end if it had none; on the monotonic clock.
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


def ms(seconds: float) -> float:
    """Milliseconds as the log has them, to a microsecond."""
    return int(seconds * 1e6 + 0.5) / 1000


class Usage(NamedTuple):
    """Tokens of one request."""

    prompt: int
    cached: int  # those of the prompt that were not computed
    generated: int


def prompt_tokens(context: RequestContext) -> int:
    """Tokens of its prompt, as far as is known: the engine's count, else the router's."""
    handoff = context.route.handoff
    counted = context.outcome.prompt_tokens or (handoff.prompt_tokens if handoff else None)
    return counted or context.request.prompt_tokens


def usage_of(context: RequestContext) -> Usage:
    """What a request has used: nothing until its answer has begun, then its prompt.

    As the engines counted: the one that answered, else the one that prefilled. Else the router's
    own count, which is an estimate where it does not know the token ids. If both counted what was
    cached, the prefill engine: to the other one all that it loads is cached.
    """
    outcome, cached = context.outcome, context.route.cached_tokens
    prompt = outcome.prompt_tokens
    if prompt is None and not context.timing.first_s:
        return Usage(0, 0, outcome.generated)
    if prompt is None:
        prompt = prompt_tokens(context)
    cached = outcome.cached_tokens if cached is None else cached
    return Usage(prompt, min(cached or 0, prompt), outcome.generated)
