"""Streams that outlive their engine: what was said so far becomes part of the prompt elsewhere.

Only where the rest is certain, or as likely as it was. The engine is asked to name the tokens of
each event; the client does not see them.
"""

from __future__ import annotations

from array import array
from time import monotonic
from typing import TYPE_CHECKING, Final

import orjson

from kvrouter.engines.engine import Role
from kvrouter.engines.families.splice import splice
from kvrouter.errors import ApiError
from kvrouter.http.client.pool import UpstreamError
from kvrouter.http.failure import Failure
from kvrouter.openai import sse
from kvrouter.openai.request import parse
from kvrouter.openai.response import tidy_events
from kvrouter.openai.token_events import Spoken
from kvrouter.prefix.tokenize import PromptTokens
from kvrouter.serving.legs.leg import Refused
from kvrouter.serving.request.context import RequestContext, Timing
from kvrouter.serving.streaming.relay import Relay
from kvrouter.serving.streaming.resumable import resumable
from kvrouter.serving.streaming.sinks import SSE_FIELDS

if TYPE_CHECKING:
    from kvrouter.engines.engine import Engine
    from kvrouter.http.client.pool import EngineResponse
    from kvrouter.openai.request import Request
    from kvrouter.serving.legs.leg import Legs
    from kvrouter.serving.legs.orchestrator import Orchestrator
    from kvrouter.serving.streaming.relay import Tidy
    from kvrouter.telemetry.metrics import Metrics

MAX_RESUMES: Final = 3
"""Engines that one stream may outlive."""


class StreamBroken(Exception):
    """A stream broke off after the client had seen some of it; not the fault of the next engine."""


class _Resuming:
    """The outlet of such a stream, where it is all of the client's answer."""

    def __init__(self, legs: Legs, metrics: Metrics, spoken: Spoken, first: RequestContext) -> None:
        self._legs = legs
        self._metrics = metrics
        self._spoken = spoken
        self._first = first

    async def stream(self, context: RequestContext, engine: Engine, answer: EngineResponse) -> None:
        """Pass a stream on, or the rest of one.

        Raises:
            StreamBroken: it broke off; nothing of it that is not whole was passed on.
        """
        exchange = context.exchange
        context.began(monotonic())
        if not exchange.started:
            exchange.start(200, fields=SSE_FIELDS + context.answer_fields, hold=True)
        tidy = self._tidy(answer)
        relay = Relay(exchange, answer, self._metrics.gaps.buckets, tidy, every=True)
        self._first.tap = relay
        try:
            await relay.run(self._legs.deadlines.idle_s, end=False)
        except UpstreamError as error:
            raise broken(self._legs, engine, error, self._spoken) from None
        check(self._legs, engine, self._spoken)
        context.outcome.reason = self._spoken.finish or "unknown"

    def _tidy(self, answer: EngineResponse) -> Tidy:
        spoken = self._spoken

        def tidy(events: bytes) -> bytes:
            seen = spoken.take(events)
            leave(answer, spoken)
            return tidy_events(seen, self._first.route.cached_tokens)

        return tidy

    def whole(self, context: RequestContext, body: bytes) -> None:
        """Never called: such a request streams."""
        raise NotImplementedError


def leave(answer: EngineResponse, spoken: Spoken) -> None:
    """Give `answer` up where its engine is to be left."""
    if spoken.failure is not None:
        answer.failed(UpstreamError(Failure.STATUS, spoken.failure))
        answer.close()


def check(legs: Legs, engine: Engine, spoken: Spoken) -> None:
    """Look at a stream that came to its end.

    Raises:
        StreamBroken: its engine is to be left all the same.
    """
    if spoken.failure is not None:
        raise broken(legs, engine, UpstreamError(Failure.STATUS, spoken.failure), spoken)


def broken(legs: Legs, engine: Engine, error: UpstreamError, spoken: Spoken) -> StreamBroken:
    """Count a stream that broke off; what to raise. An engine that cannot go on is not ill."""
    if spoken.failure is not None and spoken.error is None:
        return StreamBroken(f"{engine.address}: {spoken.failure}")
    return StreamBroken(str(legs.failed(engine, Role.DECODE, error.failure, str(error))))


class Resumption:
    """Serves streams that go on elsewhere where their engine dies.

    Args:
        orchestrator: takes prompts through their legs.
        legs: counts engines that break off.
        metrics: counts what became of streams that broke off.
    """

    def __init__(self, orchestrator: Orchestrator, legs: Legs, metrics: Metrics) -> None:
        self._orchestrator = orchestrator
        self._legs = legs
        self._metrics = metrics

    def applies(self, request: Request, model: str) -> bool:
        """Whether a stream that answers `request` can outlive its engine."""
        return resumable(request) and self._orchestrator.reports_tokens(request, model)

    async def run(self, context: RequestContext, model: str, spoken: Spoken | None = None) -> None:
        """As `Orchestrator.run`, for a request of which `applies` is true.

        Args:
            context: the request.
            model: its model.
            spoken: is told what was said, where somebody else wants to know it too.
        """
        spoken = spoken or spoken_of(context)
        context.sink = _Resuming(self._legs, self._metrics, spoken, context)
        exchange = context.exchange
        try:
            exchange.write(await self.speak(context, model, spoken))
        except StreamBroken:
            error = spoken.error
            ended = sse.error_events(_BROKEN)
            if error is not None:
                ended = sse.event(error) + sse.DONE_EVENT
            exchange.write(ended)
        exchange.end()

    async def speak(self, context: RequestContext, model: str, spoken: Spoken) -> bytes:
        """Have the answer of `context` given to its outlet, by as many engines as it takes.

        The outlet gets the legs of all of them, and raises StreamBroken where one breaks off.

        Returns:
            events that the last engine still owed the client; mostly none.

        Raises:
            StreamBroken: the answer cannot go on; the client has seen part of it.
            ApiError, Refused: no engine can do it; the client has seen nothing of it.
        """
        context.reports_tokens = True
        leg, resumes = context, 0
        try:
            while (error := await self._leg(context, leg, model)) is not None:
                context.outcome.error = str(error)
                if spoken.ended or spoken.finish is not None:
                    return spoken.ending(_counted(leg, spoken))
                following = None
                if resumes < MAX_RESUMES and isinstance(error, StreamBroken):
                    following = self._following(leg, spoken)
                if following is None:
                    self._metrics.resumed["given up"] += 1
                    context.outcome.reason = "broken"
                    raise StreamBroken(str(error))
                self._metrics.resumed["resumed"] += 1
                leg, resumes = following, resumes + 1
        finally:
            context.outcome.generated = spoken.generated
            if context.outcome.reason == "unknown":
                context.outcome.reason = spoken.finish or "unknown"
        return b""

    async def _leg(
        self, context: RequestContext, leg: RequestContext, model: str
    ) -> Exception | None:
        """What went wrong with one leg; None where the answer has come to its end."""
        try:
            await self._orchestrator.run(leg, model)
        except StreamBroken as error:
            return error
        except (ApiError, Refused) as error:
            if leg is context:
                raise
            return error
        finally:
            leg.held.release()
            if leg is not context:
                context.route.attempts += leg.route.attempts
                context.route.decode_engine = leg.route.decode_engine or context.route.decode_engine
        return None

    def _following(self, leg: RequestContext, spoken: Spoken) -> RequestContext | None:
        """The rest of the answer as a request of its own; None where it is over or not certain."""
        request = leg.request
        ids = _prompt_ids(leg, spoken)
        if not spoken.told or ids is None or request is None:
            return None
        said = spoken.certain - spoken.before
        changes = _limits(request, said)
        if changes is None:
            return None
        following = RequestContext(
            leg.exchange, leg.sink, leg.request_id, leg.fields, Timing(monotonic())
        )
        following.reports_tokens, following.trace = True, leg.trace
        new = spoken.tokens[spoken.before : spoken.certain]
        prompt = ids[:-1] + b"".join(b",%d" % token for token in new) + b"]"
        if request.kind == "completion":
            changes["prompt"] = prompt
            spoken.go_on()
        else:
            following.prompt.tokens = PromptTokens(
                array("I", orjson.loads(prompt)).tobytes(), prompt
            )
            spoken.go_on(prompt)
        following.request = parse(splice(request.body, request.spans, changes), request.kind, 1)
        return following


_BROKEN: Final = ApiError(502, "The engine's answer broke off.")


def spoken_of(context: RequestContext, *, resumes: bool = True) -> Spoken:
    """Nothing said yet of the answer to a request."""
    request = context.request
    assert request is not None
    show_ids = request.raw("return_token_ids") == b"true"
    return Spoken(request.kind, show_ids=show_ids, resumes=resumes)


def _limits(request: Request, said: int) -> dict[str, bytes | None] | None:
    """The members that bound the rest of an answer; None where nothing is left of it."""
    changes: dict[str, bytes | None] = {}
    if request.max_tokens is not None:
        newer = request.kind == "chat" and request.raw("max_completion_tokens") is not None
        rest = request.max_tokens - said
        if rest < 1:
            return None
        changes["max_completion_tokens" if newer else "max_tokens"] = b"%d" % rest
    least = request.raw("min_tokens")
    if least is not None:
        changes["min_tokens"] = b"%d" % max(0, int(least) - said)
    return changes


def _counted(leg: RequestContext, spoken: Spoken) -> int | None:
    """Tokens of the prompt, where the client asked for usage."""
    assert leg.request is not None
    options = orjson.loads(leg.request.raw("stream_options") or b"{}")
    ids = _prompt_ids(leg, spoken) if options.get("include_usage") else None
    return ids.count(b",") + 1 - spoken.before if ids is not None else None


def _prompt_ids(leg: RequestContext, spoken: Spoken) -> bytes | None:
    """The token ids that a leg's engine was given, as JSON, where anybody has told them."""
    request, handoff = leg.request, leg.route.handoff
    if request is not None and request.ids is not None:
        return request.raw("prompt")
    if leg.prompt.tokens is not None:
        return leg.prompt.tokens.json
    told = handoff.prompt_token_ids if handoff is not None else None
    return told or spoken.prompt
