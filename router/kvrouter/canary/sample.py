"""Which requests the canary samples, and how it hears their answers."""

from __future__ import annotations

from random import random
from time import monotonic
from typing import TYPE_CHECKING, Final

from kvrouter.canary.listener import Listening
from kvrouter.canary.replay import CanaryReplays, Sample
from kvrouter.engines.engine import Role
from kvrouter.serving.streaming.resumable import comparable
from kvrouter.serving.streaming.resume import spoken_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrouter.admission.waiting import EngineWait, QueueWait
    from kvrouter.canary.settings import CanarySettings
    from kvrouter.engines.engine import Engine
    from kvrouter.engines.families import Families
    from kvrouter.engines.pool import EnginePool
    from kvrouter.openai.request import Request
    from kvrouter.openai.token_events import Spoken
    from kvrouter.serving.legs.leg import Legs
    from kvrouter.serving.legs.orchestrator import Orchestrator
    from kvrouter.serving.request.context import RequestContext
    from kvrouter.serving.streaming.resume import Resumption
    from kvrouter.telemetry.metrics import Metrics

ENDED_WELL = frozenset({"stop", "length"})
MAX_BODY_BYTES: Final = 256 << 10
"""Of a request that is sampled: those that wait to be judged are kept."""


class Canary:
    """Serves sampled requests as others are served, and hands their answers over to be judged.

    Args:
        rate: share of the requests that can be compared.
        max_tokens: of prompt and answer.
        pool, families, legs, metrics: the router's.
        orchestrator: takes a prompt through its legs.
        resumption: serves streams that outlive their engine; None: none does.
        replays: judges.
        draw: a number from 0 to 1, below `rate` for those that are sampled.
    """

    def __init__(
        self,
        rate: float,
        max_tokens: int,
        *,
        pool: EnginePool,
        families: Families,
        legs: Legs,
        metrics: Metrics,
        orchestrator: Orchestrator,
        resumption: Resumption | None,
        replays: CanaryReplays,
        draw: Callable[[], float] = random,
    ) -> None:
        self._rate = rate
        self._max_tokens = max_tokens
        self._pool = pool
        self._families = families
        self._legs = legs
        self._metrics = metrics
        self._orchestrator = orchestrator
        self._resumption = resumption
        self._replays = replays
        self._draw = draw

    def samples(self, request: Request, model: str) -> bool:
        """Whether `request` is one of the sample: drawn, greedy, short, and its tokens are told."""
        if self._draw() >= self._rate or request.max_tokens is None:
            return False
        short = request.prompt_tokens + request.max_tokens <= self._max_tokens
        short = short and len(request.body) <= MAX_BODY_BYTES
        return short and comparable(request) and self._tells(request, model)

    async def run(self, context: RequestContext, model: str) -> None:
        """As `Orchestrator.run`, for a request of which `samples` is true."""
        request = context.request
        assert request is not None
        resumption = self._resumption
        if resumption is not None and resumption.applies(request, model):
            spoken = spoken_of(context)
            await resumption.run(context, model, spoken)
        else:
            spoken = spoken_of(context, resumes=False)
            context.reports_tokens = True
            context.sink = Listening(self._legs, self._metrics, spoken)
            await self._orchestrator.run(context, model)
        self._offer(context, model, spoken)

    async def close(self) -> None:
        """Stop judging."""
        await self._replays.close()

    def _offer(self, context: RequestContext, model: str, spoken: Spoken) -> None:
        """Hand over an answer that one engine gave well, and whose tokens are all known."""
        request, engine = context.request, self._engine(context)
        well = context.outcome.reason in ENDED_WELL and context.route.attempts == 1
        told = spoken.told and spoken.tokens
        if not well or not told or engine is None or request is None:
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

    def _tells(self, request: Request, model: str) -> bool:
        """Whether some engine names the tokens of its answers, and can be asked alone."""
        families = (self._families.of(e) for e in self._pool.engines(Role.DECODE, model))
        return any(each.can_isolate and each.reports_tokens(request) for each in families)

    def _engine(self, context: RequestContext) -> Engine | None:
        address = context.route.decode_engine
        return next((each for each in self._pool.targets() if each.address == address), None)


def make_canary(
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
) -> Canary | None:
    """The canary that the settings ask for, its metric exposed; None where they ask for none."""
    if not settings.canary_sample_rate:
        return None
    replays = CanaryReplays(
        pool,
        families,
        legs,
        waiting=lambda: queue_wait.waiting + engine_wait.waiting,
        below_requests=settings.canary_below_requests,
        near_tie=settings.canary_near_tie,
    )
    metrics.add(replays.outcomes)
    return Canary(
        settings.canary_sample_rate,
        settings.canary_max_tokens,
        pool=pool,
        families=families,
        legs=legs,
        metrics=metrics,
        orchestrator=orchestrator,
        resumption=resumption,
        replays=replays,
    )
