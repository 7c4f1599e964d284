"""Chooses the requests to sample, serves them, and hands their answers over for a replay.

The router asks the engine to name the tokens of a sampled answer; the client does not see them
unless it asked too.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import random
from time import monotonic
from typing import TYPE_CHECKING, Final

from kvrouter.canary.replay import CanaryReplays, Sample
from kvrouter.engines.engine import Engine, Role
from kvrouter.openai.response import tidy_events
from kvrouter.serving.streaming.relay import ClientSink, Relay
from kvrouter.serving.streaming.resume import Resumption, comparable, sent_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrouter.canary.settings import CanarySettings
    from kvrouter.engines.families import Families
    from kvrouter.engines.pool import EnginePool
    from kvrouter.http.client.pool import EngineResponse
    from kvrouter.openai.request import Request
    from kvrouter.openai.token_events import SentTokens
    from kvrouter.serving.legs.leg import EngineClient
    from kvrouter.serving.legs.orchestrator import Orchestrator
    from kvrouter.serving.request.context import RequestContext
    from kvrouter.telemetry.metrics import Metrics

ENDED_WELL = frozenset({"stop", "length"})
MAX_BODY_BYTES: Final = 256 << 10
"""Largest body of a sampled request, which is kept until its replay."""


class SampledSink(ClientSink):
    """A `ClientSink` that gives each event to `sent`, which keeps the tokens."""

    def __init__(self, client: EngineClient, metrics: Metrics, sent: SentTokens) -> None:
        super().__init__(client, metrics)
        self._sent = sent

    def respond(self, context: RequestContext, body: bytes) -> None:
        """Answer, without the tokens' names unless the client asked for them."""
        super().respond(context, self._sent.rewrite_answer(body))

    def relay(self, context: RequestContext, answer: EngineResponse) -> Relay:
        """As `ClientSink.relay`."""
        sent, cached = self._sent, context.route.cached_tokens

        def tidy(events: bytes) -> bytes:
            return tidy_events(sent.rewrite(events), cached)

        exchange, gaps = context.exchange, self.gaps(context)
        return Relay(exchange, answer, gaps, tidy, every=True, content=context.answer_began)


@dataclass(eq=False)
class Canary:
    """Serves sampled requests like all others, and hands their answers over for a replay.

    Attributes:
        pool, families, client, metrics: the router's.
    """

    settings: CanarySettings  # which requests to sample, and when to compute them again
    pool: EnginePool
    families: Families
    client: EngineClient
    metrics: Metrics
    orchestrator: Orchestrator  # takes a prompt through its legs
    resumption: Resumption | None  # serves streams that outlive their engine; None without it
    waiting: Callable[[], int]  # how many requests wait; replays begin only while none does

    def __post_init__(self) -> None:
        self._rate = self.settings.canary_sample_rate
        self._max_tokens = self.settings.canary_max_tokens
        self._replays = CanaryReplays(
            self.pool,
            self.families,
            self.client,
            waiting=self.waiting,
            below_requests=self.settings.canary_below_requests,
            near_tie=self.settings.canary_near_tie,
        )
        self.metrics.add(self._replays.outcomes)

    def samples(self, request: Request, model: str) -> bool:
        """Whether to sample `request`: drawn, greedy, short, and answered with named tokens."""
        if random() >= self._rate or request.max_tokens is None:
            return False
        short = request.prompt_tokens + request.max_tokens <= self._max_tokens
        short = short and len(request.body) <= MAX_BODY_BYTES
        return short and comparable(request) and self._names_tokens(request, model)

    async def run(self, context: RequestContext) -> None:
        """Serve a request for which `samples` is true."""
        resumption = self.resumption
        if resumption is not None and resumption.applies(context.request, context.model):
            sent = sent_tokens(context)
            await resumption.run(context, sent)
        else:
            sent = sent_tokens(context, resumes=False)
            context.reports_tokens = True
            sink = SampledSink(self.client, self.metrics, sent)
            await self.orchestrator.run(context, sink)
        self._offer(context, sent)

    async def close(self) -> None:
        """Stop the replays. Idempotent."""
        await self._replays.close()

    def _offer(self, context: RequestContext, sent: SentTokens) -> None:
        """Hand over a complete answer of one engine whose tokens are all known."""
        request, engine = context.request, self._engine(context)
        complete = context.outcome.reason in ENDED_WELL and context.route.attempts == 1
        if not complete or not (sent.known and sent.tokens) or engine is None:
            return
        if not self.families.of(engine).can_isolate:
            return
        handoff = context.route.handoff
        self._replays.offer(
            Sample(
                context.request_id,
                request,
                context.model,
                engine,
                context.route.prefill_engine,
                context.fields,
                context.prompt.ids or (handoff.prompt_token_ids if handoff else None),
                tuple(sent.tokens),
                monotonic(),
            )
        )

    def _names_tokens(self, request: Request, model: str) -> bool:
        """Whether some engine names the tokens of its answers, and can answer alone."""
        families = (self.families.of(e) for e in self.pool.engines(Role.DECODE, model))
        return any(each.can_isolate and each.reports_tokens(request) for each in families)

    def _engine(self, context: RequestContext) -> Engine | None:
        address = context.route.decode_engine
        return next((each for each in self.pool.targets() if each.address == address), None)
