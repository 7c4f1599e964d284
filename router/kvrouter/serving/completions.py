"""Completions and chats: which of the ways a request takes to its answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvrouter.openai.request import parse
from kvrouter.serving.legs.leg import KINDS

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from kvrouter.admission.waiting import QueueWait
    from kvrouter.http.server.exchange import Exchange
    from kvrouter.openai.request import Request
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


class Completions:
    """The `Service` of completions and chats.

    Args:
        orchestrator: takes a prompt through its legs.
        sink: takes the answer to a single prompt.
        fanout: serves requests for several choices.
        queue_wait: counts each share of a request as a request.
        max_choices: how many choices one request may ask for; may change.
        resumption: serves streams that outlive their engine; None: none does.
        canary: serves and judges a sample of the requests; None: there is none.
    """

    def __init__(
        self,
        orchestrator: Orchestrator,
        sink: ResponseSink,
        fanout: Fanout,
        queue_wait: QueueWait,
        max_choices: int,
        *,
        resumption: Resumption | None = None,
        canary: Sampler | None = None,
    ) -> None:
        self._orchestrator = orchestrator
        self._sink = sink
        self._fanout = fanout
        self._queue_wait = queue_wait
        self.max_choices = max_choices
        self._resumption = resumption
        self._canary = canary

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
        if self._canary is not None and self._canary.samples(request, model):
            return self._canary.run(context)
        if self._resumption is not None and self._resumption.applies(request, model):
            return self._resumption.run(context)
        return self._orchestrator.run(context, self._sink)

    async def _answer_choices(self, context: RequestContext) -> None:
        """Answer a request for several choices; each share with own legs counts as a request.

        The shares do not wait for room while they hold some: requests that come later do.
        """
        shares = self._fanout.shares(context.request, context.model)
        if len(shares) == 1:
            context.request = shares[0].request
            await self._answer_one(context)
            return
        self._queue_wait.widen(context.tenant, len(shares) - 1)
        try:
            await self._fanout.serve(context, shares)
        finally:
            self._queue_wait.leave(context.tenant, len(shares) - 1)
