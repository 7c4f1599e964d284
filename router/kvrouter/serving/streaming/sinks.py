"""Where the answer of a decode leg goes if it is the whole answer: onto the client's connection.

The seam between the legs of one prompt, which know no client, and what a client gets of them.
"""

from __future__ import annotations

from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Final

from kvrouter.errors import ApiError
from kvrouter.http.client.pool import EngineResponse, UpstreamError
from kvrouter.http.headers import SSE_HEADERS, encode_headers
from kvrouter.openai.response import (
    PromptUsage,
    answer_usage,
    generated_tokens,
    last_usage,
    prompt_usage,
    tidy_answer,
    tidy_events,
)
from kvrouter.openai.sse import BOM
from kvrouter.serving.streaming.onward import pass_on
from kvrouter.serving.streaming.relay import Relay

if TYPE_CHECKING:
    from kvrouter._native import Buckets
    from kvrouter.engines.engine import Engine
    from kvrouter.serving.legs.engine_client import EngineClient
    from kvrouter.serving.request.context import RequestContext
    from kvrouter.telemetry.metrics import Metrics

SSE_FIELDS: Final = encode_headers(SSE_HEADERS)


class ClientSink:
    """The sink of a request that is one prompt: its answer is the client's, byte for byte.

    Args:
        client: reports engines that break off; knows their deadlines.
        metrics: counts and times.
    """

    def __init__(self, client: EngineClient, metrics: Metrics) -> None:
        self._client = client
        self._metrics = metrics

    def comments(self, context: RequestContext, events: bytes) -> None:
        """Pass comments on."""
        pass_comments(context, events)

    async def stream(self, context: RequestContext, engine: Engine, answer: EngineResponse) -> None:
        """Pass a stream on; one that breaks off ends with an error event."""
        outcome = context.outcome
        relay = context.stream = self.relay(context, answer)
        begin_events(context)
        try:
            await relay.run(self._client.deadlines.idle_s)
            outcome.reason = relay.finish_reason
            if "stream_options" in context.request.spans or context.request.path is not None:
                note_prompt(context, relay.prompt_usage, self._metrics)
        except UpstreamError as error:
            outcome.error = str(self._client.failed(engine, error))
            if relay.finish_if_done():
                outcome.reason = relay.finish_reason
            else:
                outcome.reason = "broken"
                relay.fail(broke_off())
        finally:  # also if the client leaves: what it has got was generated for it
            outcome.generated = relay.generated

    def relay(self, context: RequestContext, answer: EngineResponse) -> Relay:
        """Make the relay that passes a stream on as the client may see it."""
        tidy, gaps = partial(tidy_events, cached_tokens=context.route.cached_tokens), self.gaps
        return Relay(context.exchange, answer, gaps(context), tidy, content=context.answer_began)

    def gaps(self, context: RequestContext) -> Buckets:
        """What counts the times between events of a stream."""
        return self._metrics.of(context.model).gaps.buckets

    async def whole(self, context: RequestContext, engine: Engine, answer: EngineResponse) -> None:
        """Pass an answer on, without transfer parameters, with the prefill leg's cached tokens."""
        body = await self._client.read(engine, answer)
        if body is not None:
            self.respond(context, body)
            return
        context.answer_began()
        tidy = partial(tidy_answer, cached_tokens=context.route.cached_tokens)
        if end := await pass_on(context, self._client, engine, answer, tidy):
            note_answer(context, end, self._metrics)

    def respond(self, context: RequestContext, body: bytes) -> None:
        """Answer with all of it."""
        note_answer(context, body, self._metrics)
        body = tidy_answer(body, context.route.cached_tokens)
        context.exchange.respond(200, body, fields=context.answer_fields)


def begin_events(context: RequestContext) -> None:
    """Begin a stream of events to the client, if comments have not; its head waits for a byte."""
    if not context.exchange.started:
        context.exchange.start(200, fields=SSE_FIELDS + context.answer_fields, hold=True)


def pass_comments(context: RequestContext, events: bytes) -> None:
    """Send a client what is no part of its answer, unless it reads too slowly."""
    begin_events(context)
    context.commented_s = monotonic()
    if not context.exchange.paused:
        context.exchange.write(events.removeprefix(BOM))


def broke_off() -> ApiError:
    """What the client gets if an engine's answer ends too early."""
    return ApiError(502, "The engine's answer broke off.")


def note_answer(context: RequestContext, body: bytes, metrics: Metrics) -> None:
    """Note in the context what the whole answer of a decode leg says."""
    if not context.timing.first_s:
        context.answer_began()
    if context.request.path is None:
        prompt, completion, context.outcome.reason = answer_usage(body)
    else:  # usage has other names there
        usage = last_usage(body)
        prompt, completion = prompt_usage(usage), generated_tokens(usage, 0, whole=True)
    context.outcome.generated = completion or 0
    note_prompt(context, prompt, metrics)


def note_prompt(context: RequestContext, usage: PromptUsage, metrics: Metrics) -> None:
    """Note how an engine counted the prompt; count one that the prefill engine counted else."""
    prompt_tokens, context.outcome.cached_tokens = usage
    context.outcome.prompt_tokens = prompt_tokens
    prefilled = context.route.handoff.prompt_tokens if context.route.handoff is not None else None
    if prefilled is not None and prompt_tokens is not None and prompt_tokens != prefilled:
        metrics.usage_mismatch[()] += 1
