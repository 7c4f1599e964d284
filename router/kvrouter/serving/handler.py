"""The life of a request: ten steps from its body to its last byte."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from kvrouter.access.callers import caller_of
from kvrouter.errors import ApiError
from kvrouter.http.request_id import RequestIds
from kvrouter.openai.request import parse, priority
from kvrouter.serving.cut_off import CUT_OFF, cut_off
from kvrouter.serving.legs.leg import Refused
from kvrouter.serving.request.context import RequestContext, Timing
from kvrouter.serving.request.forwarded_headers import leg_fields

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from kvrouter.admission.waiting import EngineWait, QueueWait
    from kvrouter.engines.models import ModelNames
    from kvrouter.http.server.exchange import Exchange
    from kvrouter.openai.request import Kind, Request
    from kvrouter.serving.choices.fanout import Fanout
    from kvrouter.serving.legs.orchestrator import Orchestrator
    from kvrouter.serving.request.context import ResponseSink
    from kvrouter.serving.settle import Settler
    from kvrouter.serving.streaming.resume import Resumption
    from kvrouter.telemetry.metrics import Metrics
    from kvrouter.telemetry.tracing.trace import Tracing


class RequestObserver(Protocol):
    """Sees requests come and go. It must be quick and raise nothing."""

    def enter(self, context: RequestContext) -> None:
        """A request has come."""

    def leave(self, context: RequestContext) -> None:
        """A request has ended."""


class Sampler(Protocol):
    """Serves some requests itself, because it wants to see their answers."""

    def samples(self, request: Request, model: str) -> bool:
        """Whether it serves this one."""

    async def run(self, context: RequestContext, model: str) -> None:
        """Serve a request, as `Orchestrator.run`."""


class RequestHandler:
    """Serves completions and chats: from admission to the request's line in the log.

    Every step of a request runs in its handler's task: when the client leaves, the task is
    cancelled, which closes the leg under way, gives back tickets, lease and grant, and writes
    the request's line.

    Args:
        orchestrator: takes a prompt through its legs.
        fanout: takes the shares of a request for several choices through theirs.
        outlet: where the answer of a request that is one prompt goes.
        queue_wait: bounds the requests under way; those beyond wait there.
        engine_wait: where requests wait for an engine.
        metrics: counts and times.
        ended: counts requests that have ended, and writes their lines.
        models: which models there are.
        resumption: serves streams that outlive their engine; None: none does.
        max_choices: how many choices one request may ask for; may change.
        tells_route: whether answers say where their request ran.
        tracing: decides which requests are traced; None: none is.
        canary: serves and judges a sample of the requests; None: there is none.
        board: is told of requests that come and end; None: nobody looks.
    """

    def __init__(
        self,
        *,
        orchestrator: Orchestrator,
        fanout: Fanout,
        outlet: ResponseSink,
        queue_wait: QueueWait,
        engine_wait: EngineWait,
        metrics: Metrics,
        ended: Settler,
        models: ModelNames,
        max_choices: int,
        resumption: Resumption | None = None,
        tells_route: bool = False,
        tracing: Tracing | None = None,
        canary: Sampler | None = None,
        board: RequestObserver | None = None,
    ) -> None:
        self._orchestrator = orchestrator
        self._fanout = fanout
        self._outlet = outlet
        self._queue_wait = queue_wait
        self._engine_wait = engine_wait
        self._metrics = metrics
        self._ended = ended
        self._models = models
        self._resumption = resumption
        self.max_choices = max_choices
        self._tells_route = tells_route
        self._tracing = tracing
        self._canary = canary
        self._board = board
        self._ids = RequestIds()

    def completions(self, exchange: Exchange) -> Awaitable[None]:
        """POST /v1/completions."""
        return self.serve(exchange, "completion")

    def chat(self, exchange: Exchange) -> Awaitable[None]:
        """POST /v1/chat/completions."""
        return self.serve(exchange, "chat")

    async def serve(self, exchange: Exchange, kind: Kind) -> None:
        """Answer one request. Never raises but when it is cancelled."""
        context = self._begin(exchange)
        if self._board is not None:
            self._board.enter(context)
        tenant = self._queue_wait.tenant(exchange)
        entered = self._queue_wait.enter(tenant)
        try:
            if not entered:
                context.request = parse(exchange.body, kind, self.max_choices)
                context.queued = True
                await self._queue_wait.turn(tenant, priority(context.request))
                entered, context.queued = True, False
                context.waited(context.timing.started_s, "capacity")
            self._metrics.running += 1
            await self._route(context, kind, tenant)
        except ApiError as error:
            self._answer_error(context, error)
        except Refused as refused:
            context.outcome.reason = "refused"
            exchange.respond(
                refused.status,
                refused.body,
                content_type=refused.content_type,
                fields=context.answer_fields,
            )
        except asyncio.CancelledError:
            if exchange.closed:
                context.outcome.reason = "client_left"
            elif not exchange.ended:
                context.outcome.reason, context.outcome.error = (
                    "cut_off",
                    context.outcome.error or CUT_OFF.message,
                )
                cut_off(exchange, self._metrics, context.answer_fields, context.tap)
            raise
        finally:
            if entered:
                self._metrics.running -= 1
                self._queue_wait.leave(tenant)
            self.settle(context)

    def _begin(self, exchange: Exchange) -> RequestContext:
        """What is known of a request when it comes."""
        headers, trace, lines = exchange.headers, None, None
        request_id = self._ids.of(headers)
        if self._tracing is not None:
            trace, lines = self._tracing.begin(headers)
        fields = leg_fields(request_id, headers, lines)
        context = RequestContext(exchange, self._outlet, request_id, fields, Timing(monotonic()))
        context.tells_route, context.trace = self._tells_route, trace
        return context

    async def _route(self, context: RequestContext, kind: Kind, tenant: str) -> None:
        request = context.request
        if request is None:
            request = context.request = parse(context.exchange.body, kind, self.max_choices)
        if not self._models.any:
            since_s = monotonic()
            await self._engine_wait.until(lambda: self._models.any)
            context.waited(since_s, "engine")
        path = context.exchange.path
        model = self._models.resolve(request.model, path)
        caller = caller_of(context.exchange)
        if caller is not None:
            if caller.metered:
                caller.admit(model, request.prompt_tokens)
            caller.tokens += request.prompt_tokens
        self._models.require(model, path)  # not before: the caller may have no right to the model
        if request.n > 1 or request.prompts is not None:
            await self._several(context, request, model, tenant)
        else:
            await self._whole(context, request, model)

    def _whole(self, context: RequestContext, request: Request, model: str) -> Awaitable[None]:
        """Serve what one decode leg answers."""
        if self._canary is not None and self._canary.samples(request, model):
            return self._canary.run(context, model)
        if self._resumption is not None and self._resumption.applies(request, model):
            return self._resumption.run(context, model)
        return self._orchestrator.run(context, model)

    async def _several(
        self, context: RequestContext, request: Request, model: str, tenant: str
    ) -> None:
        """Serve what asks for several choices; each share that takes own legs counts as a request.

        They do not wait for places while they hold one: those who come after them do.
        """
        shares = self._fanout.shares(request, model)
        if len(shares) == 1:
            request = context.request = shares[0].request
            await self._whole(context, request, model)
            return
        self._queue_wait.widen(tenant, len(shares) - 1)
        try:
            await self._fanout.serve(context, model, shares)
        finally:
            self._queue_wait.leave(tenant, len(shares) - 1)

    def settle(self, context: RequestContext) -> None:
        """Give back what is held; what is left is to count it and to write its line."""
        context.held.release()
        caller = caller_of(context.exchange)
        if caller is not None:
            caller.tokens += context.outcome.generated
            if caller.metered:
                caller.charge(context.outcome.generated)
        if self._board is not None:
            self._board.leave(context)
        self._ended.take(context, monotonic())

    def _answer_error(self, context: RequestContext, error: ApiError) -> None:
        context.outcome.reason = "error"
        context.outcome.error = context.outcome.error or error.message
        exchange = context.exchange
        exchange.respond(
            error.status, error.body(), headers=error.headers(), fields=context.answer_fields
        )
