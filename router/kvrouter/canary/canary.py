"""Which requests the canary samples, and how it hears their answers."""

from __future__ import annotations

from random import random
from time import monotonic
from typing import TYPE_CHECKING, Final

from kvrouter.canary.heard import Heard, Listening
from kvrouter.canary.replay import Replays, Sample
from kvrouter.engine import Role
from kvrouter.resumable import comparable
from kvrouter.resume import spoken_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrouter.config import RouterSettings
    from kvrouter.engine import Engine
    from kvrouter.entrance import Entrance, Standby
    from kvrouter.journey import Journey
    from kvrouter.leg import Legs
    from kvrouter.metrics import Metrics
    from kvrouter.openai import Request
    from kvrouter.passage import Passage
    from kvrouter.pool import Pool
    from kvrouter.resume import Resumption

ENDED_WELL = frozenset({"stop", "length"})
MAX_BODY_BYTES: Final = 256 << 10
"""Of a request that is sampled: those that wait to be judged are kept."""


class Canary:
    """Serves sampled requests as others are served, and hands their answers over to be judged.

    Args:
        rate: share of the requests that can be compared.
        max_tokens: of prompt and answer.
        pool, legs, metrics: the router's.
        journey: takes a prompt through its legs.
        resumption: serves streams that outlive their engine; None: none does.
        replays: judges.
        draw: a number from 0 to 1, below `rate` for those that are sampled.
    """

    def __init__(
        self,
        rate: float,
        max_tokens: int,
        *,
        pool: Pool,
        legs: Legs,
        metrics: Metrics,
        journey: Journey,
        resumption: Resumption | None,
        replays: Replays,
        draw: Callable[[], float] = random,
    ) -> None:
        self._rate = rate
        self._max_tokens = max_tokens
        self._pool = pool
        self._legs = legs
        self._metrics = metrics
        self._journey = journey
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

    async def run(self, passage: Passage, model: str) -> None:
        """As `Journey.run`, for a request of which `samples` is true."""
        request = passage.request
        assert request is not None
        if self._resumption is not None and self._resumption.applies(request, model):
            spoken = spoken_of(passage)
            await self._resumption.run(passage, model, spoken)
            self._offer(passage, model, spoken.tokens, told=spoken.told)
            return
        heard = Heard(show_ids=request.raw("return_token_ids") == b"true")
        passage.names_tokens = True
        passage.outlet = Listening(self._legs, self._metrics, heard)
        await self._journey.run(passage, model)
        self._offer(passage, model, heard.tokens, told=heard.told)

    async def close(self) -> None:
        """Stop judging."""
        await self._replays.close()

    def _offer(self, passage: Passage, model: str, tokens: list[int], *, told: bool) -> None:
        """Hand over an answer that one engine gave well, and whose tokens are all known."""
        request, engine = passage.request, self._engine(passage)
        well = passage.outcome in ENDED_WELL and passage.attempts == 1
        if not well or not told or not tokens or engine is None or request is None:
            return
        if not self._legs.family(engine).answers_alone:
            return
        handoff = passage.handoff
        self._replays.offer(
            Sample(
                passage.request_id,
                request,
                model,
                engine,
                passage.prefill_engine,
                passage.fields,
                passage.prompt_ids or (handoff.prompt_token_ids if handoff else None),
                tuple(tokens),
                monotonic(),
            )
        )

    def _tells(self, request: Request, model: str) -> bool:
        """Whether some engine names the tokens of its answers, and can be asked alone."""
        families = (self._legs.family(e) for e in self._pool.engines(Role.DECODE, model))
        return any(each.answers_alone and each.names_tokens(request) for each in families)

    def _engine(self, passage: Passage) -> Engine | None:
        address = passage.decode_engine
        return next((each for each in self._pool.targets() if each.address == address), None)


def make_canary(
    settings: RouterSettings,
    *,
    pool: Pool,
    legs: Legs,
    metrics: Metrics,
    journey: Journey,
    resumption: Resumption | None,
    entrance: Entrance,
    standby: Standby,
) -> Canary | None:
    """The canary that the settings ask for, its metric exposed; None where they ask for none."""
    if not settings.canary_sample_rate:
        return None
    replays = Replays(
        pool,
        legs,
        waiting=lambda: entrance.waiting + standby.waiting,
        below_requests=settings.canary_below_requests,
        near_tie=settings.canary_near_tie,
    )
    metrics.add(replays.outcomes)
    return Canary(
        settings.canary_sample_rate,
        settings.canary_max_tokens,
        pool=pool,
        legs=legs,
        metrics=metrics,
        journey=journey,
        resumption=resumption,
        replays=replays,
    )
