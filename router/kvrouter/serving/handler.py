"""The life of a request, from its admission to its settlement: one frame for all endpoints.

What is special to an endpoint is its `Service`: how it reads a body, and what answers it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Final, Protocol

from kvrouter.access.callers import caller_of
from kvrouter.admission.queue import work_of
from kvrouter.errors import FAILED, ApiError
from kvrouter.http.request_id import RequestIds
from kvrouter.http.server import encoded
from kvrouter.openai.endpoints import WITH_LEGS, endpoint_at
from kvrouter.openai.request import UNREAD, Request, parse, priority
from kvrouter.openai.sse import error_events
from kvrouter.serving.legs.failures import Refused
from kvrouter.serving.legs.leg import KINDS
from kvrouter.serving.request.context import RequestContext, Timing, answer_fields, leg_fields

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from kvrouter.admission.waiting import EngineWait, ModelGates, QueueWait
    from kvrouter.engines.models import ModelNames
    from kvrouter.http.server.exchange import Exchange
    from kvrouter.serving.choices.fanout import Fanout
    from kvrouter.serving.legs.orchestrator import Orchestrator
    from kvrouter.serving.request.caller_salt import CallerSalts
    from kvrouter.serving.request.context import ResponseSink
    from kvrouter.serving.request.limits import ServingLimits
    from kvrouter.serving.request.versions import Versions
    from kvrouter.serving.settle import Settler
    from kvrouter.serving.streaming.resume import Resumption
    from kvrouter.telemetry.metrics import Metrics
    from kvrouter.telemetry.tracing.trace import Tracing

CUT_OFF: Final = ApiError(503, "The router is stopping; try again.", retry_after_s=1)


class Sampler(Protocol):
    """Serves some requests itself, because it wants to see their answers."""

    def samples(self, request: Request, model: str) -> bool:
        """Whether it serves this one."""

    async def run(self, context: RequestContext) -> None:
        """Serve a request, as `Orchestrator.run`."""


@dataclass(eq=False, slots=True, kw_only=True)
class Completions:
    """The `Service` of completions and chats."""

    orchestrator: Orchestrator
    sink: ResponseSink  # takes the answer to a single prompt
    fanout: Fanout  # serves requests for several choices
    queue_wait: QueueWait  # counts each share of a request as a request
    limits: ServingLimits
    resumption: Resumption | None  # serves streams that outlive their engine; None: none does
    canary: Sampler | None  # serves and judges a sample of the requests

    def read(self, exchange: Exchange) -> Request:
        """See `Service`."""
        return parse(exchange.body, KINDS[exchange.path], self.limits.max_choices)

    def answer(self, context: RequestContext) -> Awaitable[None]:
        """See `Service`."""
        if context.request.n > 1 or context.request.prompts is not None:
            return self._answer_choices(context)
        return self._answer_one(context)

    def _answer_one(self, context: RequestContext) -> Awaitable[None]:
        """Answer a request that one decode leg can answer."""
        request, model = context.request, context.model
        if self.canary is not None and self.canary.samples(request, model):
            return self.canary.run(context)
        if self.resumption is not None and self.resumption.applies(request, model):
            return self.resumption.run(context)
        return self.orchestrator.run(context, self.sink)

    async def _answer_choices(self, context: RequestContext) -> None:
        """Answer a request for several choices; each share with own legs counts as a request.

        The shares do not wait for room while they hold some: requests that come later do.
        """
        shares = self.fanout.shares(context.request, context.model)
        if len(shares) == 1:
            context.request = shares[0].request
            await self._answer_one(context)
            return
        queues, more = (self.queue_wait, *context.gates), len(shares) - 1
        for queue in queues:
            queue.widen(more)
        try:
            await self.fanout.serve(context, shares)
        finally:
            for queue in queues:
                queue.leave(more)


class RequestObserver(Protocol):
    """Sees requests come and go. It must be quick and raise nothing."""

    def enter(self, context: RequestContext) -> None:
        """A request has come."""

    def leave(self, context: RequestContext) -> None:
        """A request has ended."""


class Service(Protocol):
    """Reads and answers the requests of some endpoints."""

    def read(self, exchange: Exchange) -> Request:
        """Read the body of a request.

        Raises:
            ApiError: 400.
        """

    def answer(self, context: RequestContext) -> Awaitable[None]:
        """Answer a request that was admitted and read.

        Raises:
            ApiError, Refused: the client has seen nothing yet.
        """


@dataclass(eq=False, slots=True, kw_only=True)
class RequestHandler:
    """Handles the requests of one service, each in a task of its own.

    When the client leaves, the task is cancelled. That ends the leg that runs, releases what the
    request holds and settles it.
    """

    service: Service  # reads and answers requests
    queue_wait: QueueWait  # bounds the requests in flight; those beyond wait there
    gates: ModelGates  # bound the requests in flight of some models, before `queue_wait`
    engine_wait: EngineWait  # where requests wait for an engine
    models: ModelNames  # which models there are
    versions: Versions  # choose the model that stands for an alias
    streams: dict[RequestContext, float]  # those in flight, for `KeepAlive`
    metrics: Metrics  # counts requests in flight and those that are cut off
    settler: Settler  # takes requests that have ended
    tracing: Tracing | None = None  # decides which requests are traced; None: none is
    observer: RequestObserver | None = None  # sees requests come and go
    salts: CallerSalts | None = None  # keeps the KV of callers apart; None: they share it
    route_headers: bool = False  # whether answers say where their request ran
    _ids: RequestIds = field(default_factory=RequestIds, init=False)

    async def serve(self, exchange: Exchange) -> None:
        """Answer one request.

        Raises nothing, unless it is cancelled or has a defect. Then too the client has its answer.
        """
        context = self._begin(exchange)
        if self.observer is not None:
            self.observer.enter(context)
        admitted = False
        try:
            if encoded.HEADER in exchange.headers:
                await encoded.decode(exchange)
            if self.gates:
                await self._pass_gates(context)
            admitted = self.queue_wait.enter()
            if not admitted:
                await self._wait_for_turn(context, self.queue_wait)
                admitted = True
            self.metrics.running += 1
            await self._answer(context)
        except ApiError as error:
            context.outcome.end("error", error.message)
            self._respond(context, error)
        except Refused as refused:
            self._answer_refused(context, refused)
        except asyncio.CancelledError:
            self._cancelled(context)
            raise
        except Exception:
            context.outcome.end("error")
            self._break_off(context, FAILED)
            raise
        finally:
            if admitted:
                self.metrics.running -= 1
                self.queue_wait.leave()
            self._leave(context, begun=admitted)
            self._settle(context)

    def _begin(self, exchange: Exchange) -> RequestContext:
        """What is known of a request when it comes."""
        headers, trace, lines = exchange.headers, None, None
        request_id = self._ids.of(headers)
        if self.tracing is not None:
            trace, lines = self.tracing.begin(headers)
        fields = leg_fields(request_id, headers, lines)
        context = RequestContext(exchange, request_id, fields, Timing(monotonic()))
        if exchange.path not in WITH_LEGS:
            context.endpoint = endpoint_at(exchange.path)
        context.route_headers, context.trace = self.route_headers, trace
        return context

    async def _pass_gates(self, context: RequestContext) -> None:
        """Wait until the model may have one more request in flight, in no other model's place."""
        await self._find_model(context)
        for gate in self.gates.of(context.model, context.alias):
            if not gate.enter():
                await self._wait_for_turn(context, gate)
            context.gates = (*context.gates, gate)

    def _leave(self, context: RequestContext, *, begun: bool) -> None:
        """Give back what it has in queues besides its place in the fleet's."""
        for queue, turn in context.turns:
            if begun:
                queue.correct(turn, context.outcome.generated)
            else:
                queue.refund(turn)
        for gate in context.gates:
            gate.leave()

    async def _wait_for_turn(self, context: RequestContext, queue: QueueWait) -> None:
        self._read(context)
        request, tenant, since_s = context.request, queue.tenant(context.exchange), monotonic()
        rank = priority(request)
        if not context.resolved:
            context.model = self.models.meant(request.model, context.exchange.path)
        context.queued = True
        try:
            turn = await queue.turn(tenant, rank, work_of(request), context.model)
            context.turns = (*context.turns, (queue, turn))
        finally:
            context.queued = False
            context.waited(since_s, "capacity")

    def _read(self, context: RequestContext) -> None:
        if context.request is UNREAD:
            context.request = self.service.read(context.exchange)
            if self.salts is not None:
                context.request = self.salts.salted(context.exchange, context.request)
            if context.request.stream:
                self.streams[context] = 0.0

    async def _find_model(self, context: RequestContext) -> None:
        """Find out the model; its caller may use it, and something serves the endpoint for it."""
        self._read(context)
        request, path = context.request, context.exchange.path
        if not self.models.any:
            since_s = monotonic()
            await self.engine_wait.until(lambda: self.models.any)
            context.waited(since_s, "engine")
        name = self.models.resolve(request.model, path)
        context.model = self.models.meant(name, path) if name in self.models.aliases else name
        caller = caller_of(context.exchange)
        if caller is not None and caller.metered:
            caller.check(name)
        # After `check`: a caller without a right to the model must not learn what serves it.
        self.models.require(name, path)
        if self.salts is not None:
            self.salts.require(path, context.model)
        if name in self.models.aliases:
            await self.versions.choose(context, name)
        context.resolved = True

    async def _answer(self, context: RequestContext) -> None:
        """Find out the model, charge the caller, and have the service answer."""
        if not context.resolved:
            await self._find_model(context)
        caller, tokens = caller_of(context.exchange), context.request.prompt_tokens
        if caller is not None:
            if caller.metered:
                caller.admit(tokens)
            caller.tokens += tokens
        counts = self.metrics.of(context.model)
        counts.running += 1
        try:
            await self.service.answer(context)
        finally:
            counts.running -= 1

    def _respond(self, context: RequestContext, error: ApiError) -> None:
        exchange = context.exchange
        if exchange.started:
            self._end_stream(context, error.status, error_events(error, exchange.path))
            return
        body, fields = error.body(exchange.path), answer_fields(context)
        exchange.respond(error.status, body, headers=error.headers(), fields=fields)

    def _answer_refused(self, context: RequestContext, refused: Refused) -> None:
        exchange, status = context.exchange, refused.words.status
        context.outcome.end("refused" if status < 500 else "error")
        if exchange.started:
            self._end_stream(context, status, refused.events(exchange.path))
        else:
            refused.respond(exchange, answer_fields(context))

    def _end_stream(self, context: RequestContext, status: int, events: bytes) -> None:
        """End a stream that has begun with an error; it says more than its status if it is all."""
        if not context.answering:
            context.outcome.end(context.outcome.reason, status=status)
        context.exchange.write(events)
        context.exchange.end()

    def _cancelled(self, context: RequestContext) -> None:
        """The client left, or the router stops: then end the answer with an error."""
        exchange, outcome = context.exchange, context.outcome
        if exchange.closed:
            outcome.end("client_left")
        elif not exchange.ended:
            outcome.end("cut_off")
            self.metrics.cut_off["stream" if context.answering else "none"] += 1
            self._break_off(context, CUT_OFF)

    def _break_off(self, context: RequestContext, error: ApiError) -> None:
        """End the answer with `error`, wherever it is."""
        exchange, outcome = context.exchange, context.outcome
        outcome.end(outcome.reason, error.message)
        if not (exchange.ended or exchange.closed):
            self._respond(context, error)

    def _settle(self, context: RequestContext) -> None:
        """Release what the request holds and charge its caller; the settler does the rest."""
        context.resources.release()
        self.streams.pop(context, None)
        caller = caller_of(context.exchange)
        if caller is not None:
            caller.tokens += context.outcome.generated
            if caller.metered:
                caller.charge(context.outcome.generated)
        if self.observer is not None:
            self.observer.leave(context)
        self.settler.take(context, monotonic())
