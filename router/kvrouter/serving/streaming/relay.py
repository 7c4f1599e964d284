"""A streamed answer on its way from an engine to a client, with back-pressure.

Pieces go on from within the read callback, in the engine's own chunk frames if the client speaks
HTTP/1.1; no task wakes for them. Only pieces that have something to tidy, and those that cut an
event in two, go on as whole events.

Promises: the client never sees half an event of an engine that fails, and a slow client slows its
engine alone. Nothing counts as the answer before its first event with data: comments commit to no
engine. A task or a queue between the two sockets would wake for each token, which costs more than
all else here; a change that awaits in `write` brings that back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Final

from kvrouter.errors import ApiError, names_events
from kvrouter.http.client.response import EngineResponse, UpstreamError
from kvrouter.http.headers import SSE_HEADERS, encode_headers, unchunk
from kvrouter.openai.response import (
    CONTENT,
    MARKS,
    PromptUsage,
    answer_reason,
    answer_usage,
    finish_reason,
    generated_tokens,
    prompt_usage,
    tidy_answer,
    tidy_events,
)
from kvrouter.openai.sse import BOM, MAX_EVENT_BYTES, EventBuffer, error_events
from kvrouter.serving.request.context import answer_fields
from kvrouter.serving.streaming.onward import pass_on

if TYPE_CHECKING:
    from kvrouter._native import Buckets
    from kvrouter.engines.engine import Engine
    from kvrouter.http.server.exchange import Exchange
    from kvrouter.serving.legs.leg import EngineClient
    from kvrouter.serving.request.context import RequestContext
    from kvrouter.telemetry.metrics import Metrics

Tidy = Callable[[bytes], bytes]  # makes of whole events what the client may see of them
SSE_FIELDS: Final = encode_headers(SSE_HEADERS)


class Relay:
    """Body sink of one stream. An event that is not whole when the stream breaks off is dropped.

    Args:
        exchange: the client's.
        answer: the engine's.
        gaps: takes the times between events.
        tidy: changes events.
        every: whether it may change any event; else only those with one of `MARKS`: the others go
            on as they come.
        content: called when the answer has content: at once, or with the first event that has some
            where events have names. `gaps` takes no time before.
    """

    __slots__ = (
        *("_answer", "_begun", "_buffer", "_content", "_every", "_exchange", "_feed"),
        *("_gaps", "_split", "_tidy", "_whole"),
    )

    def __init__(
        self,
        exchange: Exchange,
        answer: EngineResponse,
        gaps: Buckets,
        tidy: Tidy,
        *,
        every: bool = False,
        content: Callable[[], object] | None = None,
    ) -> None:
        self._exchange = exchange
        self._answer = answer
        assert answer.feed is not None  # it has begun
        self._feed = answer.feed
        self._gaps, self._content = gaps, content
        self._tidy = tidy
        self._every = every
        if content is not None and names_events(exchange.path):
            self._feed.watch(b"data:")
        else:
            self._begin()
        self._begun = False
        self._buffer = EventBuffer()
        self._whole = False
        self._split = False

    @property
    def events(self) -> int:
        """Server-sent events passed on so far, without the end mark."""
        return self._feed.events

    @property
    def last_s(self) -> float:
        """When a piece came last, on the monotonic clock."""
        return self._feed.last_s

    @property
    def between_events(self) -> bool:
        """Whether what was passed on ends between two events: always, but for overlong ones."""
        return not self._split or self._feed.between_events

    @property
    def generated(self) -> int:
        """Tokens passed on so far: by usage, else one for each event."""
        return generated_tokens(self._feed.tail, self._feed.events, whole=self._whole)

    @property
    def finish_reason(self) -> str:
        """Why generation ended, by the last events; "unknown" if they do not say."""
        return finish_reason(self._feed.tail)

    @property
    def prompt_usage(self) -> PromptUsage:
        """What the last usage says of the prompt."""
        return prompt_usage(self._feed.tail)

    @property
    def paused(self) -> bool:
        """Whether the client reads too slowly."""
        return self._exchange.paused

    @property
    def passer(self) -> Callable[[bytes], None] | None:
        """Takes chunk frames as they came from the engine, if the client takes them.

        The first piece came before its marks were watched for, so it is looked at here.
        """
        writer = self._exchange.frame_writer()
        untouched = writer is None or (self._begun and not self._every)
        return writer if untouched else self._pass_frames

    def write(self, data: bytes) -> None:
        """Take a piece without its frames: pass on what is whole of the stream, hold the rest."""
        self._begun = True
        events = self._buffer.take(data)
        if len(self._buffer) > MAX_EVENT_BYTES:  # no event, whatever it is
            events += self._buffer.rest()
            self._split = True
        if events:
            if self._content is not None and CONTENT.search(events):
                self._begin()
            self._exchange.write(self._tidy(events))

    async def run(self, idle_s: float, *, end: bool = True) -> None:
        """Relay to the end of the answer, which must not stop for longer than `idle_s` seconds.

        With `end` the client's answer ends with it.

        Raises:
            UpstreamError: the engine's answer broke off; `fail` can say so to the client.
        """
        self._exchange.throttle = self._answer
        self._exchange.on_close(self._answer.close)  # before another piece comes
        try:
            await self._answer.relay_to(self, idle_s)
            self._begin()  # also without content
        finally:
            self._exchange.throttle = self._content = None
        self._finish(end=end)

    def finish_if_done(self) -> bool:
        """End the client's answer well if the stream broke off after its end mark."""
        if self._feed.done:
            self._finish(end=True)
        return self._feed.done

    def fail(self, error: ApiError) -> None:
        """End the stream with an error event."""
        self._exchange.write(error_events(error, self._exchange.path, self.events))
        self._exchange.end()

    def _finish(self, *, end: bool) -> None:
        self._whole = True
        if rest := self._buffer.rest():
            self._exchange.write(self._tidy(rest))
        if end:
            self._exchange.end()

    def _pass_frames(self, frames: bytes) -> None:
        self.write(unchunk(frames))

    def _begin(self) -> None:
        """There is content: tell it once, count gaps, look only for what may have to be tidied."""
        content, self._content = self._content, None
        self._feed.count_into(self._gaps)
        if not self._every:
            self._feed.watch(*MARKS)
        if content is not None:
            content()


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
            outcome.end(relay.finish_reason)
            if "stream_options" in context.request.spans or context.request.path is not None:
                note_prompt(context, relay.prompt_usage, self._metrics)
        except UpstreamError as error:
            outcome.break_off(str(self._client.failed(engine, error)))
            if relay.finish_if_done():
                outcome.end(relay.finish_reason)
            else:
                relay.fail(broke_off())
        finally:  # also if the client leaves: what it has got was generated for it
            outcome.count(relay.generated)

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
        context.exchange.respond(200, body, fields=answer_fields(context))


def begin_events(context: RequestContext) -> None:
    """Begin a stream of events to the client, if comments have not; its head waits for a byte."""
    if not context.exchange.started:
        context.exchange.start(200, fields=SSE_FIELDS + answer_fields(context), hold=True)


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
        context.outcome.end(answer_reason(body))
    prompt, generated = answer_usage(body)
    context.outcome.count(generated)
    note_prompt(context, prompt, metrics)


def note_prompt(context: RequestContext, usage: PromptUsage, metrics: Metrics) -> None:
    """Note how an engine counted the prompt; count one that the prefill engine counted else."""
    context.outcome.count_prompt(*usage)
    prompt_tokens, handoff = usage[0], context.route.handoff
    prefilled = handoff.prompt_tokens if handoff is not None else None
    if prefilled is not None and prompt_tokens is not None and prompt_tokens != prefilled:
        metrics.usage_mismatch[()] += 1
