"""Completions and chats: which of the ways a request takes to its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvrouter.openai.request import Request, parse
from kvrouter.serving.legs.leg import KINDS

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from kvrouter.admission.waiting import QueueWait
    from kvrouter.http.server.exchange import Exchange
    from kvrouter.serving.choices.fanout import Fanout
    from kvrouter.serving.legs.orchestrator import Orchestrator
    from kvrouter.serving.request.context import RequestContext, ResponseSink
    from kvrouter.serving.streaming.resume import Resumption


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
    max_choices: int  # how many choices one request may ask for; may change
    resumption: Resumption | None  # serves streams that outlive their engine; None: none does
    canary: Sampler | None  # serves and judges a sample of the requests

    def read(self, exchange: Exchange) -> Request:
        """See `Service`."""
        return parse(exchange.body, KINDS[exchange.path], self.max_choices)

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
