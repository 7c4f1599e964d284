"""A request for several choices: legs for each prompt or sample, one answer for all.

A `Fanout` takes shares through their legs; their answers meet in a `Gathering`, whole or event by
event, and go to the client as one. The first share that fails ends the others; a client that leaves
ends all of them.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING

from kvrouter.engines.engine import Role
from kvrouter.errors import ApiError
from kvrouter.http.client.pool import EngineResponse, UpstreamError
from kvrouter.http.failure import Failure
from kvrouter.openai import sse
from kvrouter.openai.response import finish_reason, generated_tokens, prompt_usage
from kvrouter.serving.choices.merge import (
    BadShare,
    Share,
    ShareError,
    StreamMerge,
    answer_id,
    merge_answers,
    split,
)
from kvrouter.serving.legs.failures import Refused
from kvrouter.serving.request.context import RequestContext, Route, Timing, answer_fields, with_id
from kvrouter.serving.request.summary import usage_of
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
    from collections.abc import Coroutine, Iterable

    from kvrouter.engines.engine import Engine
    from kvrouter.engines.families import Families
    from kvrouter.engines.pool import EnginePool
    from kvrouter.openai.request import Request
    from kvrouter.openai.token_events import SentTokens
    from kvrouter.serving.choices.merge import Piece
    from kvrouter.serving.legs.leg import EngineClient
    from kvrouter.serving.legs.orchestrator import Orchestrator
    from kvrouter.telemetry.metrics import Metrics


@dataclass(eq=False, slots=True, kw_only=True)
class Fanout:
    """Serves requests for several choices, each share with its own legs."""

    pool: EnginePool
    families: Families  # say how many samples one prefill leg serves
    orchestrator: Orchestrator
    client: EngineClient  # reports engines that break off; knows their deadlines
    metrics: Metrics
    resumption: Resumption | None  # lets shares outlive their engine; None: none does

    def shares(self, request: Request, model: str) -> list[Share]:
        """The shares that serve `request`; a single one if one engine does all of it.

        Raises:
            ApiError: 400: a prompt is wrong.
        """
        if request.n > 1:
            for engine in self.pool.engines(Role.DECODE, model):
                family = self.families.of(engine)
                if family.needs_legs_per_sample(request):
                    return split(request, alone=True, varies_seeds=family.varies_seeds)
        return split(request, alone=False)

    async def serve(self, context: RequestContext, shares: list[Share]) -> None:
        """Take every share through its legs and answer the client. Nothing runs on afterwards.

        Raises:
            ApiError, Refused: a share's, if the client has seen nothing yet.
        """
        gathering = Gathering(context, self.client, self.metrics)
        parts = context.shares = [_part(context, share, i) for i, share in enumerate(shares)]
        sinks = [ShareSink(share, gathering) for share in shares]
        try:
            await _all(map(self._run, parts, sinks))
            gathering.finish()
        except (ApiError, Refused, BadShare, ShareError) as error:
            if not gathering.begun:
                raise error if isinstance(error, ApiError | Refused) else _unusable(error) from None
            context.outcome.end("broken")
            context.exchange.write(_as_events(error))
            context.exchange.end()
        finally:
            _sum_up(context, parts, shares, answered=gathering.begun)

    def _run(self, part: RequestContext, sink: ShareSink) -> Coroutine[None, None, None]:
        """Take a share through its legs."""
        resumption = self.resumption
        if resumption is not None and resumption.applies(part.request, part.model):
            return sink.resume(resumption, part)
        return self.orchestrator.run(part, sink)


def _part(context: RequestContext, share: Share, number: int) -> RequestContext:
    """The context of one share; engines see the request's id with the share's number."""
    request_id = f"{context.request_id}-{number}"
    fields = with_id(context.fields, request_id)
    timing = Timing(context.timing.started_s, context.timing.waited_s)
    part = RequestContext(context.exchange, request_id, fields, timing)
    part.request, part.model, part.trace = share.request, context.model, context.trace
    part.alias = context.alias
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


def _sum_up(
    context: RequestContext, parts: list[RequestContext], shares: list[Share], *, answered: bool
) -> None:
    """The shares have ended: release what they hold, and join their routes, times and outcomes."""
    for part in parts:
        part.resources.release()
        part.stream = None  # the log keeps the parts; a stream knows the contexts that hold it
    outcomes = [part.outcome for part in parts]
    context.route = _joined_route([part.route for part in parts])
    began = [part.timing for part in parts if part.timing.first_s]
    if began:
        first = min(began, key=attrgetter("first_s"))
        context.timing = replace(first, started_s=context.timing.started_s)
    outcome, generated = context.outcome, sum(each.generated for each in outcomes)
    used = [
        usage_of(part) for part, share in zip(parts, shares, strict=True) if share.counts_prompt
    ]
    prompt, cached = sum(each.prompt for each in used), sum(each.cached for each in used)
    if not answered:  # the client has got an error instead
        generated = prompt = cached = 0
    outcome.count(generated)
    outcome.count_prompt(prompt, cached)
    reason = outcomes[-1].reason if outcome.reason == "unknown" else outcome.reason
    outcome.end(reason, _joined(each.error for each in outcomes))


def _joined_route(routes: list[Route]) -> Route:
    """The route of a request whose shares took these."""
    plans = [route.plan for route in routes if route.plan is not None]
    landed = [route.landed_blocks for route in routes if route.landed_blocks is not None]
    return Route(
        plan=plans[0] if plans else None,
        prefill_engine=_joined(route.prefill_engine for route in routes),
        decode_engine=_joined(route.decode_engine for route in routes),
        attempts=sum(route.attempts for route in routes),
        hit_engine=sum(route.hit_engine for route in routes),
        hit_lower=sum(route.hit_lower for route in routes),
        hit_store=sum(route.hit_store for route in routes),
        landed_blocks=sum(landed) if landed else None,
        nothing_landed=_joined(route.nothing_landed for route in routes),
    )


def _joined(words: Iterable[str | None]) -> str | None:
    """The different ones of `words`, in their order."""
    return ",".join(dict.fromkeys(word for word in words if word)) or None


def _as_events(error: Exception) -> bytes:
    """The last events of a stream that cannot go on."""
    if isinstance(error, ApiError):
        return sse.error_events(error)
    if isinstance(error, Refused):
        return error.events()
    payload = error.payload if isinstance(error, ShareError) else b""
    return sse.last_events(payload) if payload else sse.error_events(_unusable(error))


def _unusable(error: Exception) -> ApiError:
    return ApiError(502, f"An engine's answer cannot be served: {error}.")


@dataclass(eq=False)
class Gathering:
    """Merges the answers of a request's shares, and answers the client.

    It throttles every engine that streams as the client throttles it.
    """

    context: RequestContext  # the request's
    client: EngineClient  # reports engines that break off; knows their deadlines
    metrics: Metrics  # counts and times

    def __post_init__(self) -> None:
        self.exchange = self.context.exchange  # the client's
        self._answer_id = answer_id(self.context.request.kind, self.context.request_id)
        self.merge = StreamMerge(self._answer_id)  # makes one stream of those of the shares
        # Those that came whole, by the first choice of their shares.
        self.answers: dict[int, Piece] = {}
        self.streaming: set[EngineResponse] = set()  # those that come as streams now
        self.begun = False  # whether the client has some of the answer; comments are none

    def finish(self) -> None:
        """End the client's answer: all shares have ended well.

        Raises:
            BadShare: they do not make one answer.
        """
        if self.context.request.stream:
            self.exchange.write(self.merge.end())
            self.exchange.end()
            return
        pieces = [self.answers[first] for first in sorted(self.answers)]
        body = merge_answers(pieces, self._answer_id)
        self.begun = True
        self.exchange.respond(200, body, fields=answer_fields(self.context))

    def pause(self) -> None:
        """The client reads too slowly."""
        for answer in self.streaming:
            answer.pause()

    def resume(self) -> None:
        """The client caught up."""
        for answer in self.streaming:
            answer.resume()


class ShareSink:
    """The sink of one share: its answer goes to where all of them meet."""

    def __init__(self, share: Share, gathering: Gathering) -> None:
        self.share = share  # the share that it answers
        self.gathering = gathering  # where that is
        # The context of the share's first leg, if others may follow.
        self.first: RequestContext | None = None
        # What was sent of a stream that may go on at another engine; None: it may not.
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
        gathering, cached = self.gathering, part.route.cached_tokens
        for event in sse.split_events(last):
            gathering.exchange.write(gathering.merge.event(self.share, event, cached)[0])

    def comments(self, context: RequestContext, events: bytes) -> None:
        """Pass comments on, in the answer to the whole request."""
        del context
        pass_comments(self.gathering.context, events)

    async def stream(self, context: RequestContext, engine: Engine, answer: EngineResponse) -> None:
        """Mix a stream into the client's, event by event.

        Raises:
            ApiError: 502: it broke off.
            StreamBroken: it broke off, and may go on at another engine.
            BadShare: it cannot be mixed with the others.
            ShareError: the engine ended it with an error.
        """
        gathering, sent = self.gathering, self.sent
        exchange, client, metrics = gathering.exchange, gathering.client, gathering.metrics
        context.answer_began()
        begin_events(gathering.context)
        gathering.begun = True
        exchange.throttle = gathering
        stream = context.stream = _ShareStream(self, context, answer)
        exchange.on_close(answer.close)  # before another piece comes
        gathering.streaming.add(answer)
        try:
            await answer.relay_to(stream, client.deadlines.idle_s)
            stream.finish()
        except UpstreamError as error:
            if stream.problem is not None:
                raise stream.problem from None
            if sent is not None:
                raise broken(client, engine, error, sent) from None
            context.outcome.fail(str(client.failed(engine, error)))
            if not stream.done:
                raise broke_off() from None
        finally:
            gathering.streaming.discard(answer)
            context.outcome.count(stream.generated)
            stream.problem = None  # its traceback holds this frame
        if sent is not None:
            check_end(client, engine, sent)
        context.outcome.end(finish_reason(stream.tail))
        if "stream_options" in self.share.request.spans:
            note_prompt(context, prompt_usage(stream.tail), metrics)

    async def whole(self, context: RequestContext, engine: Engine, answer: EngineResponse) -> None:
        """Keep an answer until all are there."""
        body = await self.gathering.client.read_whole(engine, answer)
        note_answer(context, body, self.gathering.metrics)
        self.gathering.answers[self.share.first] = self.share, body, context.route.cached_tokens


class _ShareStream:
    """Body sink of one share's stream: passes on, event by event, what is the client's."""

    between_events = True  # only whole events go on
    passer = None  # chunk frames are the engine's own: they cannot be passed on as they are

    def __init__(self, sink: ShareSink, context: RequestContext, answer: EngineResponse) -> None:
        self._sink = sink
        self._first = sink.first or context
        self._answer = answer
        self._merge, self._exchange = sink.gathering.merge, sink.gathering.exchange
        self._buffer = sse.EventBuffer()
        assert answer.feed is not None  # it has begun
        self._feed = answer.feed
        self._feed.count_into(sink.gathering.metrics.of(context.model).gaps.buckets)
        self.problem: BadShare | ShareError | None = None  # why it was given up, if it was
        self.events = 0  # events with choices that were passed on

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
