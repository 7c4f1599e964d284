"""Where the answers of all shares of a request meet and go to the client as one."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvrouter.http.client.pool import EngineResponse, UpstreamError
from kvrouter.http.failure import Failure
from kvrouter.openai import sse
from kvrouter.openai.response import finish_reason, generated_tokens, prompt_usage
from kvrouter.serving.choices.merge import (
    BadShare,
    ShareError,
    StreamMerge,
    answer_id,
    merge_answers,
)
from kvrouter.serving.request.headers import answer_fields
from kvrouter.serving.streaming.relay import (
    begin_events,
    broke_off,
    note_answer,
    note_prompt,
    pass_comments,
)
from kvrouter.serving.streaming.resume import (
    Resumption,
    StreamBroken,
    broken,
    check_end,
    leave_if_failed,
    sent_tokens,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvrouter._native import Buckets
    from kvrouter.engines.engine import Engine
    from kvrouter.http.server.exchange import Exchange
    from kvrouter.openai.token_events import SentTokens
    from kvrouter.serving.choices.merge import Piece, Share
    from kvrouter.serving.legs.leg import EngineClient
    from kvrouter.serving.request.context import RequestContext
    from kvrouter.telemetry.metrics import Metrics


@dataclass(eq=False)
class Gathering:
    """Merges the answers of a request's shares, and answers the client.

    Attributes:
        begun: whether the client has some of the answer; comments are none.
    """

    context: RequestContext  # the request's
    client: EngineClient  # reports engines that break off; knows their deadlines
    metrics: Metrics  # counts and times

    def __post_init__(self) -> None:
        self._exchange = self.context.exchange
        self._answer_id = answer_id(self.context.request.kind, self.context.request_id)
        self._merge = StreamMerge(self._answer_id)
        self._answers: dict[int, Piece] = {}
        self._throttle = _Throttle()
        self.begun = False

    def whole(self, share: Share, part: RequestContext, body: bytes) -> None:
        """Keep an answer until all are there."""
        note_answer(part, body, self.metrics)
        self._answers[share.first] = share, body, part.route.cached_tokens

    def add_events(self, share: Share, part: RequestContext, events: bytes) -> None:
        """Mix in whole events of a share."""
        for event in sse.split_events(events):
            self._exchange.write(self._merge.event(share, event, part.route.cached_tokens)[0])

    async def stream(
        self, sink: ShareSink, part: RequestContext, engine: Engine, answer: EngineResponse
    ) -> None:
        """Mix a stream of a share into the client's, event by event.

        Raises:
            ApiError: 502: it broke off.
            StreamBroken: it broke off, and may go on at another engine.
            BadShare: it cannot be mixed with the others.
            ShareError: the engine ended it with an error.
        """
        exchange, sent = self._exchange, sink.sent
        part.answer_began()
        begin_events(self.context)
        self.begun = True
        exchange.throttle = self._throttle
        gaps = self.metrics.of(part.model).gaps.buckets
        stream = part.stream = _ShareStream(self._merge, sink, part, answer, exchange, gaps=gaps)
        exchange.on_close(answer.close)  # before another piece comes
        try:
            with self._throttle.holding(answer):
                await answer.relay_to(stream, self.client.deadlines.idle_s)
            stream.finish()
        except UpstreamError as error:
            if stream.problem is not None:
                raise stream.problem from None
            if sent is not None:
                raise broken(self.client, engine, error, sent) from None
            part.outcome.fail(str(self.client.failed(engine, error)))
            if not stream.done:
                raise broke_off() from None
        finally:
            part.outcome.count(stream.generated)
            stream.problem = None  # its traceback holds this frame
        if sent is not None:
            check_end(self.client, engine, sent)
        part.outcome.end(finish_reason(stream.tail))
        if "stream_options" in sink.share.request.spans:
            note_prompt(part, prompt_usage(stream.tail), self.metrics)

    def finish(self) -> None:
        """End the client's answer: all shares have ended well.

        Raises:
            BadShare: they do not make one answer.
        """
        if self.context.request.stream:
            self._exchange.write(self._merge.end())
            self._exchange.end()
            return
        pieces = [self._answers[first] for first in sorted(self._answers)]
        body = merge_answers(pieces, self._answer_id)
        self.begun = True
        self._exchange.respond(200, body, fields=answer_fields(self.context))


class ShareSink:
    """The sink of one share: its answer goes to where all of them meet.

    Attributes:
        share: the share that it answers.
        first: the context of the share's first leg, if others may follow.
        sent: what was sent of a stream that may go on at another engine; None: it may not.
    """

    def __init__(self, share: Share, gathering: Gathering) -> None:
        self.share = share
        self._gathering = gathering
        self.first: RequestContext | None = None
        self.sent: SentTokens | None = None

    async def resume(self, resumption: Resumption, part: RequestContext) -> None:
        """Have a share's stream mixed in, by as many engines as it takes.

        Raises:
            ApiError, ShareError: it cannot go on.
            Refused: no engine can do it.
        """
        sent = self.sent = sent_tokens(part)
        self.first = part
        try:
            last = await resumption.run_into(part, self, sent)
        except StreamBroken:
            if sent.error is not None:
                raise ShareError(sent.error) from None
            raise broke_off() from None
        self._gathering.add_events(self.share, part, last)

    def comments(self, context: RequestContext, events: bytes) -> None:
        """Pass comments on, in the answer to the whole request."""
        del context
        pass_comments(self._gathering.context, events)

    async def stream(self, context: RequestContext, engine: Engine, answer: EngineResponse) -> None:
        """Mix a stream into the client's."""
        await self._gathering.stream(self, context, engine, answer)

    async def whole(self, context: RequestContext, engine: Engine, answer: EngineResponse) -> None:
        """Keep an answer until all are there."""
        body = await self._gathering.client.read_whole(engine, answer)
        self._gathering.whole(self.share, context, body)


class _Throttle:
    """Passes the client's back-pressure on to every engine that streams."""

    def __init__(self) -> None:
        self._answers: set[EngineResponse] = set()

    @contextmanager
    def holding(self, answer: EngineResponse) -> Iterator[None]:
        """Throttle `answer` too, while the context lasts."""
        self._answers.add(answer)
        try:
            yield
        finally:
            self._answers.discard(answer)

    def pause(self) -> None:
        """The client reads too slowly."""
        for answer in self._answers:
            answer.pause()

    def resume(self) -> None:
        """The client caught up."""
        for answer in self._answers:
            answer.resume()


class _ShareStream:
    """Body sink of one share's stream: passes on, event by event, what is the client's.

    Attributes:
        problem: why it was given up, if it was.
        events: events with choices that were passed on.
    """

    between_events = True  # only whole events go on
    passer = None  # chunk frames are the engine's own: they cannot be passed on as they are

    def __init__(
        self,
        merge: StreamMerge,
        sink: ShareSink,
        part: RequestContext,
        answer: EngineResponse,
        exchange: Exchange,
        *,
        gaps: Buckets,
    ) -> None:
        self._merge = merge
        self._sink = sink
        self._first = sink.first or part
        self._answer = answer
        self._exchange = exchange
        self._buffer = sse.EventBuffer()
        assert answer.feed is not None  # it has begun
        self._feed = answer.feed
        self._feed.count_into(gaps)
        self.problem: BadShare | ShareError | None = None
        self.events = 0

    @property
    def paused(self) -> bool:
        """Whether the client reads too slowly."""
        return self._exchange.paused

    def write(self, data: bytes) -> None:
        """Take a piece; one that cannot be mixed ends the stream with `problem`."""
        if self.problem is not None:
            return
        try:
            self._pass(sse.split_events(self._buffer.take(data)))
            if len(self._buffer) > sse.MAX_EVENT_BYTES:
                raise BadShare("an event that does not end")
        except (BadShare, ShareError) as problem:
            self.problem = problem
            self._answer.failed(UpstreamError(Failure.ANSWER, str(problem)))
            self._answer.close()

    def finish(self) -> None:
        """The whole body has come: take what is left of it, without an end of its own.

        Raises:
            BadShare, ShareError: `problem`, or it cannot be passed on.
        """
        if self.problem is not None:
            raise self.problem
        rest = self._buffer.rest()
        if rest.strip():
            self._pass([rest])

    @property
    def tail(self) -> bytes:
        """The last bytes of the engine's stream."""
        return self._feed.tail

    @property
    def last_s(self) -> float:
        """When a piece came last, on the monotonic clock."""
        return self._feed.last_s

    @property
    def done(self) -> bool:
        """Whether the engine's end mark came."""
        return self._feed.done

    @property
    def generated(self) -> int:
        """Tokens passed on so far: by usage, else one for each event."""
        return generated_tokens(self.tail, self.events, whole=self.done)

    def _pass(self, events: list[bytes]) -> None:
        share, sent, cached = self._sink.share, self._sink.sent, self._first.route.cached_tokens
        for event in events:
            seen = event if sent is None else sent.rewrite(event)
            frame, choices = self._merge.event(share, seen, cached)
            self.events += choices
            self._exchange.write(frame)
        if sent is not None:
            leave_if_failed(self._answer, sent)
