"""One client's request as several prompts or samples: legs for each, one answer for all.

The first share that fails ends the others; a client that leaves ends all of them.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager, suppress
from time import monotonic
from typing import TYPE_CHECKING

import orjson

from kvrouter._native import StreamFeed
from kvrouter.engines.engine import Role
from kvrouter.errors import ApiError
from kvrouter.http.client.pool import UpstreamError
from kvrouter.http.failure import Failure
from kvrouter.openai import sse
from kvrouter.openai.response import finish_reason, generated_tokens, prompt_tokens
from kvrouter.serving.choices.merge import (
    BadShare,
    ShareError,
    StreamMerge,
    answer_id,
    merge_answers,
)
from kvrouter.serving.choices.split import split
from kvrouter.serving.legs.leg import Refused
from kvrouter.serving.request.context import RequestContext, Timing
from kvrouter.serving.request.forwarded_headers import with_id
from kvrouter.serving.streaming.resume import StreamBroken, broken, check, leave, spoken_of
from kvrouter.serving.streaming.sinks import SSE_FIELDS, compare_prompts, note_answer

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Iterator

    from kvrouter.engines.engine import Engine
    from kvrouter.http.client.pool import EngineResponse
    from kvrouter.http.server.exchange import Exchange
    from kvrouter.openai.request import Request
    from kvrouter.openai.token_events import Spoken
    from kvrouter.serving.choices.merge import Piece
    from kvrouter.serving.choices.split import Share
    from kvrouter.serving.legs.leg import Legs
    from kvrouter.serving.legs.orchestrator import Orchestrator
    from kvrouter.serving.streaming.resume import Resumption
    from kvrouter.telemetry.metrics import Metrics


class Fanout:
    """Serves requests for several choices by one journey per share.

    Args:
        orchestrator: takes each share through its legs.
        legs: counts engines that break off; knows their deadlines.
        metrics: counts and times.
        resumption: has shares go on elsewhere where their engine dies; None: none does.
    """

    def __init__(
        self,
        orchestrator: Orchestrator,
        legs: Legs,
        metrics: Metrics,
        resumption: Resumption | None = None,
    ) -> None:
        self._orchestrator = orchestrator
        self._legs = legs
        self._metrics = metrics
        self._resumption = resumption

    def shares(self, request: Request, model: str) -> list[Share]:
        """What `request` is taken apart into; one share where one engine does all of it.

        Raises:
            ApiError: 400: a prompt is wrong.
        """
        alone = self._orchestrator.needs_legs_per_sample(request, model) if request.n > 1 else None
        if alone is None:
            return split(request, alone=False)
        return split(request, alone=True, varies_seeds=alone.varies_seeds)

    async def serve(self, context: RequestContext, model: str, shares: list[Share]) -> None:
        """Take every share through its legs and answer the client. Nothing runs on afterwards.

        Raises:
            ApiError, Refused: a share's, where the client has seen nothing yet.
        """
        assert context.request is not None
        gathering = _Gathering(context, self._legs, self._metrics)
        parts = [_part(context, share, at, gathering) for at, share in enumerate(shares)]
        context.shares = parts
        try:
            await _all(self._run(part, model) for part in parts)
            gathering.finish()
        except (ApiError, Refused, BadShare, ShareError) as error:
            if not context.exchange.started:
                raise _as_answer(error) from None
            context.outcome.reason = "broken"
            context.exchange.write(_as_events(error))
            context.exchange.end()
        finally:
            context.sum_up()
            for part in parts:  # they are kept for the log; these know the contexts that hold them
                part.sink, part.tap = context.sink, None

    def _run(self, part: RequestContext, model: str) -> Coroutine[None, None, None]:
        """Take a share through its legs."""
        outlet, request = part.sink, part.request
        assert isinstance(outlet, _ShareOutlet)
        assert request is not None
        if self._resumption is None or not self._resumption.applies(request, model):
            return self._orchestrator.run(part, model)
        return outlet.speak(self._resumption, part, model)


def _part(
    context: RequestContext, share: Share, number: int, gathering: _Gathering
) -> RequestContext:
    """The context of one share; engines know it by the request's id and its number."""
    request_id = f"{context.request_id}-{number}"
    fields = with_id(context.fields, request_id)
    outlet = _ShareOutlet(share, gathering)
    timing = Timing(context.timing.started_s, context.timing.waited_s)
    part = RequestContext(context.exchange, outlet, request_id, fields, timing)
    part.request, part.trace = share.request, context.trace
    return part


async def _all(runs: Iterable[Coroutine[None, None, None]]) -> None:
    """Run all of them at once; the first failure cancels the others and is raised."""
    tasks = [asyncio.create_task(run, name="share") for run in runs]
    task: asyncio.Task[None] | None
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done() and not task.cancelled():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        tasks.clear()  # they hold their errors, whose tracebacks hold this frame
        task = None


class _ShareOutlet:
    """The outlet of one share: its answer goes to where all of them meet."""

    def __init__(self, share: Share, gathering: _Gathering) -> None:
        self._share = share
        self._gathering = gathering
        self._spoken: Spoken | None = None
        self._first: RequestContext | None = None

    async def speak(self, resumption: Resumption, part: RequestContext, model: str) -> None:
        """Have a share's stream mixed in by as many engines as it takes.

        Raises:
            ApiError, ShareError: it cannot go on.
            Refused: no engine can do it.
        """
        spoken, self._first = spoken_of(part), part
        self._spoken = spoken
        try:
            owed = await resumption.speak(part, model, spoken)
        except StreamBroken:
            if spoken.error is not None:
                raise ShareError(spoken.error) from None
            raise ApiError(502, "The engine's answer broke off.") from None
        self._gathering.owed(self._share, part, owed)

    async def stream(self, context: RequestContext, engine: Engine, answer: EngineResponse) -> None:
        """Mix a stream into the client's."""
        first = self._first or context
        await self._gathering.stream(self._share, context, engine, answer, first, self._spoken)

    def whole(self, context: RequestContext, body: bytes) -> None:
        """Keep an answer until all are there."""
        self._gathering.whole(self._share, context, body)


class _Gathering:
    """Where the answers of all shares meet and go to the client as one."""

    def __init__(self, context: RequestContext, legs: Legs, metrics: Metrics) -> None:
        request = context.request
        assert request is not None
        self._passage = context
        self._exchange = context.exchange
        self._legs = legs
        self._metrics = metrics
        self._streamed = request.stream
        self._ident = answer_id(request.kind, context.request_id)
        self._merge = StreamMerge(self._ident)
        self._answers: dict[int, Piece] = {}
        self._throttle = _Throttle()

    def whole(self, share: Share, part: RequestContext, body: bytes) -> None:
        """Keep an answer until all are there."""
        note_answer(part, body, self._metrics)
        self._answers[share.first] = share, body, part.route.cached_tokens

    def owed(self, share: Share, part: RequestContext, events: bytes) -> None:
        """Mix in what an engine that broke off after a share's last token did not say."""
        for event in sse.split_events(events):
            self._exchange.write(self._merge.event(share, event, part.route.cached_tokens)[0])

    async def stream(  # noqa: PLR0917
        self,
        share: Share,
        part: RequestContext,
        engine: Engine,
        answer: EngineResponse,
        first: RequestContext,
        spoken: Spoken | None,
    ) -> None:
        """Mix a stream into the client's, event by event.

        Args:
            share: whose it is.
            part: the leg's context.
            engine: that answers.
            answer: its stream.
            first: the context of the share's first leg.
            spoken: what it has said of a stream that may go on elsewhere; None where it may not.

        Raises:
            ApiError: 502: it broke off.
            StreamBroken: it broke off, and may go on elsewhere.
            BadShare: it cannot be mixed with the others.
            ShareError: the engine ended it with an error.
        """
        exchange = self._exchange
        part.began(monotonic())
        if not exchange.started:
            exchange.start(200, fields=SSE_FIELDS + self._passage.answer_fields, hold=True)
            exchange.throttle = self._throttle
        tap = _Tap(self._merge, share, first, answer, exchange, self._metrics, spoken)
        part.tap = tap
        exchange.on_close(answer.close)  # before another piece comes
        try:
            with self._throttle.holding(answer):
                await answer.relay_to(tap, self._legs.deadlines.idle_s)
            tap.finish()
        except UpstreamError as error:
            if tap.problem is not None:
                raise tap.problem from None
            if spoken is not None:
                raise broken(self._legs, engine, error, spoken) from None
            failed = self._legs.failed(engine, Role.DECODE, error.failure, str(error))
            part.outcome.error = str(failed)
            if not tap.ended:
                raise ApiError(502, "The engine's answer broke off.") from None
        finally:
            part.outcome.generated = tap.generated
            tap.problem = None  # its traceback holds this frame
        if spoken is not None:
            check(self._legs, engine, spoken)
        part.outcome.reason = finish_reason(tap.tail)
        if "stream_options" in share.request.spans:
            compare_prompts(part, prompt_tokens(tap.tail), self._metrics)

    def finish(self) -> None:
        """All shares have ended well: end the client's answer.

        Raises:
            BadShare: they do not make one answer.
        """
        if self._streamed:
            self._exchange.write(self._merge.end())
            self._exchange.end()
            return
        pieces = [self._answers[first] for first in sorted(self._answers)]
        body = merge_answers(pieces, self._ident)
        self._exchange.respond(200, body, fields=self._passage.answer_fields)


class _Throttle:
    """Passes the client's back-pressure on to every engine that streams."""

    def __init__(self) -> None:
        self._answers: set[EngineResponse] = set()

    @contextmanager
    def holding(self, answer: EngineResponse) -> Iterator[None]:
        """Tell `answer` too, for so long."""
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


class _Tap:
    """Sink of one share's stream: cuts it into events and passes on what is the client's.

    Attributes:
        problem: why it was given up, if it was.
        events: events with choices that were passed on.
    """

    passer = None  # chunk frames are the engine's own: they cannot be passed on as they are

    def __init__(  # noqa: PLR0917
        self,
        merge: StreamMerge,
        share: Share,
        part: RequestContext,
        answer: EngineResponse,
        exchange: Exchange,
        metrics: Metrics,
        spoken: Spoken | None,
    ) -> None:
        self._merge = merge
        self._share = share
        self._part = part
        self._answer = answer
        self._exchange = exchange
        self._spoken = spoken
        self._buffer = sse.EventBuffer()
        self._feed = answer.feed or StreamFeed()
        self._feed.count_into(metrics.gaps.buckets)
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
        if self._answer.feed is None:
            self._feed.note(data)
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
    def ended(self) -> bool:
        """Whether the engine's stream has come to its end mark."""
        return sse.is_done(self._feed.tail)

    @property
    def generated(self) -> int:
        """Tokens passed on so far: as usage tells, else one for each event."""
        return generated_tokens(self._feed.tail, self.events, whole=self.ended)

    def _pass(self, events: list[bytes]) -> None:
        spoken = self._spoken
        for event in events:
            seen = event if spoken is None else spoken.take(event)
            frame, choices = self._merge.event(self._share, seen, self._part.route.cached_tokens)
            self.events += choices
            self._exchange.write(frame)
        if spoken is not None:
            leave(self._answer, spoken)


def _as_answer(error: Exception) -> Exception:
    """What answers the request if nothing of it was answered yet."""
    return error if isinstance(error, ApiError | Refused) else _unusable(error)


def _as_events(error: Exception) -> bytes:
    """The last events of a stream that cannot go on."""
    if isinstance(error, ApiError):
        return sse.error_events(error)
    payload = error.payload if isinstance(error, ShareError) else b""
    if isinstance(error, Refused):
        with suppress(ValueError):
            payload = orjson.dumps(orjson.loads(error.body))  # on one line
    return sse.event(payload) + sse.DONE_EVENT if payload else sse.error_events(_unusable(error))


def _unusable(error: Exception) -> ApiError:
    return ApiError(502, f"An engine's answer cannot be served: {error}.")
