"""Chooses the requests to sample, serves them, and hands their answers over for a replay.

The router asks the engine to name the tokens of a sampled answer; the client does not see them
unless it asked too.
"""

from __future__ import annotations

from random import random
from time import monotonic
from typing import TYPE_CHECKING, Final

from kvrouter.canary.replay import CanaryReplays, Sample
from kvrouter.engines.engine import Role
from kvrouter.openai.response import tidy_events
from kvrouter.serving.streaming.relay import Relay
from kvrouter.serving.streaming.resumable import comparable
from kvrouter.serving.streaming.resume import spoken_of
from kvrouter.serving.streaming.sinks import ClientSink

if TYPE_CHECKING:
    from kvrouter.admission.waiting import EngineWait, QueueWait
    from kvrouter.canary.settings import CanarySettings
    from kvrouter.engines.engine import Engine
    from kvrouter.engines.families import Families
    from kvrouter.engines.pool import EnginePool
    from kvrouter.http.client.pool import EngineResponse
    from kvrouter.openai.request import Request
    from kvrouter.openai.token_events import Spoken
    from kvrouter.serving.legs.leg import Legs
    from kvrouter.serving.legs.orchestrator import Orchestrator
    from kvrouter.serving.request.context import RequestContext
    from kvrouter.serving.streaming.resume import Resumption
    from kvrouter.telemetry.metrics import Metrics

ENDED_WELL = frozenset({"stop", "length"})
MAX_BODY_BYTES: Final = 256 << 10
"""Largest body of a sampled request, which is kept until its replay."""


class SampledSink(ClientSink):
    """A `ClientSink` that gives each event to `spoken`, which keeps the tokens."""

    def __init__(self, legs: Legs, metrics: Metrics, spoken: Spoken) -> None:
        super().__init__(legs, metrics)
        self._spoken = spoken

    def whole(self, context: RequestContext, body: bytes) -> None:
        """Answer, without the tokens' names unless the client asked for them."""
        super().whole(context, self._spoken.whole(body))

    def relay(self, context: RequestContext, answer: EngineResponse) -> Relay:
        """As `ClientSink.relay`."""
        spoken, cached = self._spoken, context.route.cached_tokens

        def tidy(events: bytes) -> bytes:
            return tidy_events(spoken.take(events), cached)

        return Relay(context.exchange, answer, self._metrics.gaps.buckets, tidy, every=True)


class Canary:
    """Serves sampled requests like all others, and hands their answers over for a replay.

    Args:
        settings: which requests to sample, and when to compute them again.
        pool, families, legs, metrics: the router's.
        orchestrator: takes a prompt through its legs.
        resumption: serves streams that outlive their engine; None without it.
        queue_wait, engine_wait: replays begin only while neither has waiting requests.
    """

    def __init__(
        self,
        settings: CanarySettings,
        *,
        pool: EnginePool,
        families: Families,
        legs: Legs,
        metrics: Metrics,
        orchestrator: Orchestrator,
        resumption: Resumption | None,
        queue_wait: QueueWait,
        engine_wait: EngineWait,
    ) -> None:
        self._rate = settings.canary_sample_rate
        self._max_tokens = settings.canary_max_tokens
        self._pool = pool
        self._families = families
        self._legs = legs
        self._metrics = metrics
        self._orchestrator = orchestrator
        self._resumption = resumption
        self._replays = CanaryReplays(
            pool,
            families,
            legs,
            waiting=lambda: queue_wait.waiting + engine_wait.waiting,
            below_requests=settings.canary_below_requests,
            near_tie=settings.canary_near_tie,
        )
        metrics.add(self._replays.outcomes)

    def samples(self, request: Request, model: str) -> bool:
        """Whether to sample `request`: drawn, greedy, short, and answered with named tokens."""
        if random() >= self._rate or request.max_tokens is None:
            return False
        short = request.prompt_tokens + request.max_tokens <= self._max_tokens
        short = short and len(request.body) <= MAX_BODY_BYTES
        return short and comparable(request) and self._names_tokens(request, model)

    async def run(self, context: RequestContext, model: str) -> None:
        """As `Orchestrator.run`, for a request for which `samples` is true."""
        request = context.request
        assert request is not None
        resumption = self._resumption
        if resumption is not None and resumption.applies(request, model):
            spoken = spoken_of(context)
            await resumption.run(context, model, spoken)
        else:
            spoken = spoken_of(context, resumes=False)
            context.reports_tokens = True
            context.sink = SampledSink(self._legs, self._metrics, spoken)
            await self._orchestrator.run(context, model)
        self._offer(context, model, spoken)

    async def close(self) -> None:
        """Stop the replays. Idempotent."""
        await self._replays.close()

    def _offer(self, context: RequestContext, model: str, spoken: Spoken) -> None:
        """Hand over a complete answer of one engine whose tokens are all known."""
        request, engine = context.request, self._engine(context)
        complete = context.outcome.reason in ENDED_WELL and context.route.attempts == 1
        named = spoken.told and spoken.tokens
        if not complete or not named or engine is None or request is None:
            return
        if not self._families.of(engine).can_isolate:
            return
        handoff = context.route.handoff
        self._replays.offer(
            Sample(
                context.request_id,
                request,
                model,
                engine,
                context.route.prefill_engine,
                context.fields,
                context.prompt.ids or (handoff.prompt_token_ids if handoff else None),
                tuple(spoken.tokens),
                monotonic(),
            )
        )

    def _names_tokens(self, request: Request, model: str) -> bool:
        """Whether some engine names the tokens of its answers, and can answer alone."""
        families = (self._families.of(e) for e in self._pool.engines(Role.DECODE, model))
        return any(each.can_isolate and each.reports_tokens(request) for each in families)

    def _engine(self, context: RequestContext) -> Engine | None:
        address = context.route.decode_engine
        return next((each for each in self._pool.targets() if each.address == address), None)
