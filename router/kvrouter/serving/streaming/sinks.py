"""Where the answer of a decode leg goes: onto the client's connection, or into a merge with others.

The seam between the legs of one prompt, which know no client, and what a client gets of them.
"""

from __future__ import annotations

from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Final

from kvrouter.engines.engine import Role
from kvrouter.errors import ApiError
from kvrouter.http.client.pool import UpstreamError
from kvrouter.http.headers import SSE_HEADERS, encode_headers
from kvrouter.openai.response import answer_usage, tidy_answer, tidy_events
from kvrouter.serving.streaming.relay import Relay

if TYPE_CHECKING:
    from kvrouter.engines.engine import Engine
    from kvrouter.http.client.pool import EngineResponse
    from kvrouter.serving.legs.leg import Legs
    from kvrouter.serving.request.context import RequestContext
    from kvrouter.telemetry.metrics import Metrics

SSE_FIELDS: Final = encode_headers(SSE_HEADERS)


class ClientSink:
    """The outlet of a request that is one prompt: its answer is the client's, byte for byte.

    Args:
        legs: counts engines that break off; knows their deadlines.
        metrics: counts and times.
    """

    def __init__(self, legs: Legs, metrics: Metrics) -> None:
        self._legs = legs
        self._metrics = metrics

    async def stream(self, context: RequestContext, engine: Engine, answer: EngineResponse) -> None:
        """Pass a stream on; one that breaks off ends with an error event."""
        exchange = context.exchange
        context.began(monotonic())
        exchange.start(200, fields=SSE_FIELDS + context.answer_fields, hold=True)
        relay = self.relay(context, answer)
        context.tap = relay
        try:
            await relay.run(self._legs.deadlines.idle_s)
        except UpstreamError as error:
            failed = self._legs.failed(engine, Role.DECODE, error.failure, str(error))
            context.outcome.error = str(failed)
            context.outcome.reason = "broken"
            if relay.ended():
                context.outcome.reason = relay.finish_reason()
            else:
                relay.fail(ApiError(502, "The engine's answer broke off."))
        else:
            context.outcome.reason = relay.finish_reason()
            if _wants_usage(context):
                compare_prompts(context, relay.prompt_tokens(), self._metrics)
        finally:  # also where the client leaves: what it has got was generated for it
            context.outcome.generated = relay.generated

    def relay(self, context: RequestContext, answer: EngineResponse) -> Relay:
        """What passes a stream on as the client may see it."""
        tidy = partial(tidy_events, cached_tokens=context.route.cached_tokens)
        return Relay(context.exchange, answer, self._metrics.gaps.buckets, tidy)

    def whole(self, context: RequestContext, body: bytes) -> None:
        """EngineResponse, without transfer parameters and with the prefill leg's cached tokens."""
        note_answer(context, body, self._metrics)
        body = tidy_answer(body, context.route.cached_tokens)
        context.exchange.respond(200, body, fields=context.answer_fields)


def _wants_usage(context: RequestContext) -> bool:
    return context.request is not None and "stream_options" in context.request.spans


def note_answer(context: RequestContext, body: bytes, metrics: Metrics) -> None:
    """A decode leg's whole answer is there: what it tells goes to the context."""
    context.began(monotonic())
    prompt, completion, context.outcome.reason = answer_usage(body)
    context.outcome.generated = completion or 0
    compare_prompts(context, prompt, metrics)


def compare_prompts(context: RequestContext, prompt_tokens: int | None, metrics: Metrics) -> None:
    """Count a prompt that the decode engine tokenised otherwise than the prefill engine."""
    told = context.route.handoff.prompt_tokens if context.route.handoff is not None else None
    if told is not None and prompt_tokens is not None and prompt_tokens != told:
        metrics.usage_mismatch[()] += 1
