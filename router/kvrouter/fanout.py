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
from kvrouter.engine import Failure, Role
from kvrouter.errors import DONE_FRAME, ApiError
from kvrouter.http.client import UpstreamError
from kvrouter.leg import Refused
from kvrouter.merge import BadShare, Events, ShareError, StreamMerge, answer_id, merge_answers
from kvrouter.outlet import SSE_FIELDS, compare_prompts, note_answer
from kvrouter.passage import Passage, leg_fields
from kvrouter.relay import finish_reason, prompt_tokens
from kvrouter.shares import split

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Iterator

    from kvrouter.engine import Engine
    from kvrouter.http.client import Answer
    from kvrouter.http.exchange import Exchange
    from kvrouter.journey import Journey
    from kvrouter.leg import Legs
    from kvrouter.merge import Piece
    from kvrouter.metrics import Metrics
    from kvrouter.openai import Request
    from kvrouter.shares import Share


class Fanout:
    """Serves requests for several choices by one journey per share.

    Args:
        journey: takes each share through its legs.
        legs: counts engines that break off; knows their deadlines.
        metrics: counts and times.
    """

    def __init__(self, journey: Journey, legs: Legs, metrics: Metrics) -> None:
        self._journey = journey
        self._legs = legs
        self._metrics = metrics

    def shares(self, request: Request, model: str) -> list[Share]:
        """What `request` is taken apart into; one share where one engine does all of it.

        Raises:
            ApiError: 400: a prompt is wrong.
        """
        alone = request.n > 1 and self._journey.samples_alone(request, model)
        return split(request, alone=alone)

    async def serve(self, passage: Passage, model: str, shares: list[Share]) -> None:
        """Take every share through its legs and answer the client. Nothing runs on afterwards.

        Raises:
            ApiError, Refused: a share's, where the client has seen nothing yet.
        """
        assert passage.request is not None
        gathering = _Gathering(passage, self._legs, self._metrics)
        parts = [_part(passage, share, at, gathering) for at, share in enumerate(shares)]
        passage.shares = parts
        try:
            await _all(self._journey.run(part, model) for part in parts)
            gathering.finish()
        except (ApiError, Refused, BadShare, ShareError) as error:
            if not passage.exchange.started:
                raise _told(error) from None
            passage.outcome = "broken"
            passage.exchange.write(_error_frame(error))
            passage.exchange.end()
        finally:
            passage.sum_up()


def _part(passage: Passage, share: Share, number: int, gathering: _Gathering) -> Passage:
    """The passage of one share; engines know it by the request's id and its number."""
    request_id = f"{passage.request_id}-{number}"
    fields = leg_fields(request_id, passage.exchange.headers)
    outlet = _ShareOutlet(share, gathering)
    part = Passage(passage.exchange, outlet, request_id, fields, passage.started_s)
    part.request = share.request
    return part


async def _all(runs: Iterable[Coroutine[None, None, None]]) -> None:
    """Run all of them at once; the first failure cancels the others and is raised."""
    tasks = [asyncio.create_task(run, name="share") for run in runs]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            error = task.exception() if task.done() and not task.cancelled() else None
            if error is not None:
                raise error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _ShareOutlet:
    """The outlet of one share: its answer goes to where all of them meet."""

    def __init__(self, share: Share, gathering: _Gathering) -> None:
        self._share = share
        self._gathering = gathering

    async def stream(self, passage: Passage, engine: Engine, answer: Answer) -> None:
        """Mix a stream into the client's."""
        await self._gathering.stream(self._share, passage, engine, answer)

    def whole(self, passage: Passage, body: bytes) -> None:
        """Keep an answer until all are there."""
        self._gathering.whole(self._share, passage, body)


class _Gathering:
    """Where the answers of all shares meet and go to the client as one."""

    def __init__(self, passage: Passage, legs: Legs, metrics: Metrics) -> None:
        request = passage.request
        assert request is not None
        self._passage = passage
        self._exchange = passage.exchange
        self._legs = legs
        self._metrics = metrics
        self._streamed = request.stream
        self._ident = answer_id(request.kind, passage.request_id)
        self._merge = StreamMerge(self._ident)
        self._answers: dict[int, Piece] = {}
        self._throttle = _Throttle()

    def whole(self, share: Share, part: Passage, body: bytes) -> None:
        """Keep an answer until all are there."""
        note_answer(part, body, self._metrics)
        self._answers[share.first] = share, body, part.cached_tokens

    async def stream(self, share: Share, part: Passage, engine: Engine, answer: Answer) -> None:
        """Mix a stream into the client's, event by event.

        Raises:
            ApiError: 502: it broke off.
            BadShare: it cannot be mixed with the others.
            ShareError: the engine ended it with an error.
        """
        exchange = self._exchange
        if not exchange.started:
            exchange.start(200, fields=SSE_FIELDS + self._passage.id_line, hold=True)
            exchange.throttle = self._throttle
        part.began(monotonic())
        tap = _Tap(self._merge, share, part, answer, exchange, self._metrics)
        exchange.on_close(answer.close)  # before another piece comes
        try:
            with self._throttle.holding(answer):
                await answer.relay_to(tap, self._legs.deadlines.idle_s)
            tap.finish()
        except UpstreamError as error:
            if tap.problem is not None:
                raise tap.problem from None
            failed = self._legs.failed(engine, Role.DECODE, error.failure, str(error))
            part.error = str(failed)
            raise ApiError(502, "The engine's answer broke off.") from None
        finally:
            part.generated = tap.events
        part.outcome = finish_reason(tap.tail)
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
        self._exchange.respond(200, body, fields=self._passage.id_line)


class _Throttle:
    """Passes the client's back-pressure on to every engine that streams."""

    def __init__(self) -> None:
        self._answers: set[Answer] = set()

    @contextmanager
    def holding(self, answer: Answer) -> Iterator[None]:
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
        part: Passage,
        answer: Answer,
        exchange: Exchange,
        metrics: Metrics,
    ) -> None:
        self._merge = merge
        self._share = share
        self._part = part
        self._answer = answer
        self._exchange = exchange
        self._metrics = metrics
        self._cut = Events()
        self._feed = answer.feed or StreamFeed()
        self._feed.count_into(metrics.gaps.counts)
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
            self._pass(self._cut.feed(data))
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
        rest = self._cut.rest()
        if rest.strip():
            self._pass([rest])

    @property
    def tail(self) -> bytes:
        """The last bytes of the engine's stream."""
        return self._feed.tail

    def _pass(self, events: list[bytes]) -> None:
        for event in events:
            frame, choices = self._merge.event(self._share, event, self._part.cached_tokens)
            self.events += choices
            self._exchange.write(frame)


def _told(error: Exception) -> Exception:
    """What a client is told that has seen nothing yet."""
    if isinstance(error, ApiError | Refused):
        return error
    return ApiError(502, f"An engine's answer cannot be served: {error}.")


def _error_frame(error: Exception) -> bytes:
    """The last events of a stream that cannot go on."""
    if isinstance(error, ApiError):
        return error.frame()
    payload = error.payload if isinstance(error, ShareError) else b""
    if isinstance(error, Refused):
        with suppress(ValueError):
            payload = orjson.dumps(orjson.loads(error.body))  # on one line
    if not payload:
        return ApiError(502, f"An engine's answer cannot be served: {error}.").frame()
    return b"data: " + payload + b"\n\n" + DONE_FRAME
