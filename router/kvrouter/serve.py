"""The life of a request: ten steps from its body to its last byte."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING

from kvrouter.cut_off import CUT_OFF, cut_off
from kvrouter.errors import ApiError
from kvrouter.leg import Refused
from kvrouter.openai import parse, priority
from kvrouter.passage import Passage, RequestIds, leg_fields

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from kvrouter.canary.canary import Canary
    from kvrouter.ended import Ended
    from kvrouter.entrance import Entrance, Standby
    from kvrouter.fanout import Fanout
    from kvrouter.http.exchange import Exchange
    from kvrouter.journey import Journey
    from kvrouter.metrics import Metrics
    from kvrouter.models import ModelNames
    from kvrouter.openai import Kind, Request
    from kvrouter.outlet import Outlet
    from kvrouter.page.board import Board
    from kvrouter.resume import Resumption
    from kvrouter.tracing.trace import Tracing


class Router:
    """Serves completions and chats: from admission to the request's line in the log.

    Every step of a request runs in its handler's task: when the client leaves, the task is
    cancelled, which closes the leg under way, gives back tickets, lease and grant, and writes
    the request's line.

    Args:
        journey: takes a prompt through its legs.
        fanout: takes the shares of a request for several choices through theirs.
        outlet: where the answer of a request that is one prompt goes.
        entrance: bounds the requests under way; those beyond wait there.
        standby: where requests wait for an engine.
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
        journey: Journey,
        fanout: Fanout,
        outlet: Outlet,
        entrance: Entrance,
        standby: Standby,
        metrics: Metrics,
        ended: Ended,
        models: ModelNames,
        max_choices: int,
        resumption: Resumption | None = None,
        tells_route: bool = False,
        tracing: Tracing | None = None,
        canary: Canary | None = None,
        board: Board | None = None,
    ) -> None:
        self._journey = journey
        self._fanout = fanout
        self._outlet = outlet
        self._entrance = entrance
        self._standby = standby
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
        passage = self._begin(exchange)
        if self._board is not None:
            self._board.enter(passage)
        tenant = self._entrance.tenant(exchange)
        entered = self._entrance.enter(tenant)
        try:
            if not entered:
                passage.request = parse(exchange.body, kind, self.max_choices)
                passage.queued = True
                await self._entrance.turn(tenant, priority(passage.request))
                entered, passage.queued = True, False
                passage.waited(passage.started_s, "capacity")
            self._metrics.running += 1
            await self._route(passage, kind, tenant)
        except ApiError as error:
            self._answer_error(passage, error)
        except Refused as refused:
            passage.outcome = "refused"
            exchange.respond(
                refused.status,
                refused.body,
                content_type=refused.content_type,
                fields=passage.answer_fields,
            )
        except asyncio.CancelledError:
            if exchange.closed:
                passage.outcome = "client_left"
            elif not exchange.ended:
                passage.outcome, passage.error = "cut_off", passage.error or CUT_OFF.message
                cut_off(exchange, self._metrics, passage.answer_fields, passage.tap)
            raise
        finally:
            if entered:
                self._metrics.running -= 1
                self._entrance.leave(tenant)
            self.settle(passage)

    def _begin(self, exchange: Exchange) -> Passage:
        """What is known of a request when it comes."""
        headers, trace, context = exchange.headers, None, None
        request_id = self._ids.of(headers)
        if self._tracing is not None:
            trace, context = self._tracing.begin(headers)
        fields = leg_fields(request_id, headers, context)
        passage = Passage(exchange, self._outlet, request_id, fields, monotonic())
        passage.tells_route, passage.trace = self._tells_route, trace
        return passage

    async def _route(self, passage: Passage, kind: Kind, tenant: str) -> None:
        request = passage.request
        if request is None:
            request = passage.request = parse(passage.exchange.body, kind, self.max_choices)
        if not self._models.any:
            since_s = monotonic()
            await self._standby.until(lambda: self._models.any)
            passage.waited(since_s, "engine")
        path = passage.exchange.path
        model = self._models.resolve(request.model, path)
        caller = passage.exchange.caller
        if caller is not None:
            if caller.metered:
                caller.admit(model, request.prompt_tokens)
            caller.tokens += request.prompt_tokens
        self._models.require(model, path)  # not before: the caller may have no right to the model
        if request.n > 1 or request.prompts is not None:
            await self._several(passage, request, model, tenant)
        else:
            await self._whole(passage, request, model)

    def _whole(self, passage: Passage, request: Request, model: str) -> Awaitable[None]:
        """Serve what one decode leg answers."""
        if self._canary is not None and self._canary.samples(request, model):
            return self._canary.run(passage, model)
        if self._resumption is not None and self._resumption.applies(request, model):
            return self._resumption.run(passage, model)
        return self._journey.run(passage, model)

    async def _several(self, passage: Passage, request: Request, model: str, tenant: str) -> None:
        """Serve what asks for several choices; each share that takes own legs counts as a request.

        They do not wait for places while they hold one: those who come after them do.
        """
        shares = self._fanout.shares(request, model)
        if len(shares) == 1:
            request = passage.request = shares[0].request
            await self._whole(passage, request, model)
            return
        self._entrance.widen(tenant, len(shares) - 1)
        try:
            await self._fanout.serve(passage, model, shares)
        finally:
            self._entrance.leave(tenant, len(shares) - 1)

    def settle(self, passage: Passage) -> None:
        """Give back what is held; what is left is to count it and to write its line."""
        passage.release()
        caller = passage.exchange.caller
        if caller is not None:
            caller.tokens += passage.generated
            if caller.metered:
                caller.charge(passage.generated)
        if self._board is not None:
            self._board.leave(passage)
        self._ended.take(passage, monotonic())

    def _answer_error(self, passage: Passage, error: ApiError) -> None:
        passage.outcome = "error"
        passage.error = passage.error or error.message
        exchange = passage.exchange
        exchange.respond(
            error.status, error.body(), headers=error.headers(), fields=passage.answer_fields
        )
