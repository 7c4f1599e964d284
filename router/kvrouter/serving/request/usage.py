"""Tokens that a request has used, as its caller pays for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvrouter.serving.request.context import RequestContext


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
    outcome, handoff = context.outcome, context.route.handoff
    prompt, cached = outcome.prompt_tokens, context.route.cached_tokens
    if prompt is None and not context.timing.first_s:
        return Usage(0, 0, outcome.generated)
    if prompt is None and handoff is not None:
        prompt = handoff.prompt_tokens
    if prompt is None:
        prompt = context.request.prompt_tokens
    cached = outcome.cached_tokens if cached is None else cached
    return Usage(prompt, min(cached, prompt), outcome.generated)
