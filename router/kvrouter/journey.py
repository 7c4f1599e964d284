"""The legs of one prompt: planned, prefilled, landed, decoded; other engines where one fails.

Knows no client: what an engine answers goes to the passage's outlet.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Final

from kvrouter.account import note_plan
from kvrouter.engine import Failure, Role
from kvrouter.errors import ApiError
from kvrouter.families.base import Order
from kvrouter.leg import (
    MAX_ATTEMPTS,
    NOT_TAKEN,
    LegFailed,
    Refused,
    decode_error,
    without_rank,
)
from kvrouter.pair import Pairs
from kvrouter.places import Places
from kvrouter.plan import elsewhere, loaders, partners, without
from kvrouter.release import pinned, spent

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from kvrouter.budget import RecomputeBudget
    from kvrouter.dispatch import Ahead
    from kvrouter.engine import Engine
    from kvrouter.entrance import Standby
    from kvrouter.expected import Expected
    from kvrouter.families.base import Coming, Family, Meeting
    from kvrouter.handover import Handover
    from kvrouter.http.client import Answer
    from kvrouter.leg import Legs
    from kvrouter.metrics import Metrics
    from kvrouter.openai import Request
    from kvrouter.passage import Passage
    from kvrouter.plan import Plan, RouteInputs
    from kvrouter.policies.base import Policy
    from kvrouter.pool import Pool
    from kvrouter.prefill_priority import Priorities
    from kvrouter.release import Releases
    from kvrouter.survey import Survey

OPEN_ENDED_TOKENS: Final = 256
"""Tokens that a request without max_tokens is taken to generate, for load alone."""


class Journey:
    """Takes prompts through their legs on the engines of a pool, each in its caller's task.

    Cancelling closes the leg under way and gives back its ticket; lease and grant stay the
    passage's, whose owner releases them.

    Args:
        pool: the engines.
        policy: chooses among them.
        survey: gathers what it decides upon.
        legs: asks engines.
        handover: awaits landings.
        ahead: sends decode legs ahead of them.
        budget: bounds what decode engines may compute for want of KV.
        standby: where requests wait for an engine.
        releases: frees what prefill engines hold for decode legs that do not come.
        priorities: ranks prefill legs.
        expected: is told which engines will hold which blocks.
        metrics: counts and times.
    """

    def __init__(
        self,
        *,
        pool: Pool,
        policy: Policy,
        survey: Survey,
        legs: Legs,
        handover: Handover,
        ahead: Ahead,
        budget: RecomputeBudget,
        standby: Standby,
        releases: Releases,
        priorities: Priorities,
        expected: Expected,
        metrics: Metrics,
    ) -> None:
        self._pool = pool
        self._policy = policy
        self._survey = survey
        self._legs = legs
        self._pairs = Pairs(pool, policy, legs, releases, standby)
        self._handover = handover
        self._ahead = ahead
        self._budget = budget
        self._standby = standby
        self._releases = releases
        self._priorities = priorities
        self._expected = expected
        self._metrics = metrics

    def samples_alone(self, request: Request, model: str) -> Family | None:
        """The family of engines that may decode `request` and take one sample per hand-over."""
        families = (self._legs.family(e) for e in self._pool.engines(Role.DECODE, model))
        return next((family for family in families if family.samples_alone(request)), None)

    def names_tokens(self, request: Request, model: str) -> bool:
        """Whether some engine that may decode `request` can name the tokens of its stream."""
        engines = self._pool.engines(Role.DECODE, model)
        return any(self._legs.family(engine).names_tokens(request) for engine in engines)

    async def run(self, passage: Passage, model: str) -> None:
        """Take the prompt of `passage.request` from its plan to the end of its answer.

        Raises:
            ApiError: no engine can do it, or none has room.
            Refused: an engine refused the request itself.
        """
        decode = self._pool.engines(Role.DECODE, model)
        if not decode:
            since_s = monotonic()
            decode = await self._standby.until(lambda: self._pool.engines(Role.DECODE, model))
            passage.waited(since_s, "engine")
        if not decode:
            raise ApiError(503, "No decode engine is available.", retry_after_s=1)
        prefill = self._pool.engines(Role.PREFILL, model)
        inputs = await self._survey.inputs(passage, model, decode, prefill)
        plan = passage.plan = self._policy.plan(inputs)
        passage.planned_s = monotonic()
        note_plan(passage, inputs, self._metrics)
        places = self._reserve(passage, plan)
        try:
            if self._legs.family(plan.decode).order is Order.CONCURRENT:
                await self._at_once(passage, model, inputs)
                return
            coming = self._ahead.announce(passage)
            if plan.prefill is not None and coming is None:
                await self.prefill(passage, plan.prefill, inputs)
                self._rebind(passage, model, inputs)
            elif coming is None:
                self._compute_alone(passage, plan)
            await self.decode(passage, model, passage.plan.decode, inputs, coming)
        finally:
            places.release()
            if passage.pinned is not None:
                self._releases.begin(passage, model)

    def _reserve(self, passage: Passage, plan: Plan) -> Places:
        """Count the legs of `plan` on their engines: prompts planned meanwhile see the load."""
        places = passage.places
        if places is None:
            places = passage.places = Places(self._pool, self._expected, passage.hashes)
        if plan.prefill is not None:
            places.plan(Role.PREFILL, plan.prefill, plan.prefill_tokens)
        else:
            places.leave(Role.PREFILL)
        load = _decode_tokens(passage.request), _computing(passage)
        places.plan(Role.DECODE, plan.decode, *load)
        return places

    def _rebind(self, passage: Passage, model: str, inputs: RouteInputs) -> None:
        """Choose the decode engine again where others can load the KV too: loads have changed.

        `passage.plan` has the engine and `passage.places` its load then.
        """
        plan, places, handoff = passage.plan, passage.places, passage.handoff
        assert plan is not None
        assert plan.prefill is not None
        assert places is not None
        if handoff is None or self._legs.family(plan.decode).order is not Order.STORE:
            return
        if not self._handover.loadable_anywhere(passage):
            return
        ready = self._pool.engines(Role.DECODE, model)
        engines = loaders(ready, plan.prefill.family, handoff.manifest)
        if not engines or (len(engines) == 1 and engines[0] is plan.decode):
            return
        engine = self._policy.rebind(inputs, engines, plan.decode, places.tokens(Role.DECODE))
        if engine is not plan.decode and partners((plan.prefill,), engine, inputs.model):
            passage.plan = replace(plan, decode=engine)
            self._metrics.rebound[()] += 1
            places.plan(Role.DECODE, engine, _decode_tokens(passage.request))

    async def _at_once(self, passage: Passage, model: str, inputs: RouteInputs) -> None:
        """Both legs together; where no prefill engine can do its part, decode alone."""
        left = await self._pairs.serve(
            passage, model, inputs, prefill=self._prefill_leg, decode=self._decode_on
        )
        plan = passage.plan
        if left is not None and plan is not None:
            self._reserve(passage, plan)
            if passage.error:
                self._recompute(passage, plan.missing_tokens)
            self._compute_alone(passage, plan)
            await self.decode(passage, model, plan.decode, left, None)

    def _compute_alone(self, passage: Passage, plan: Plan) -> None:
        """Count what decode computes because there is no prefill engine, where there should be one.

        Raises:
            ApiError: 429: it is too much.
        """
        if plan.why == "no prefill engine" and self._pool.named(Role.PREFILL):
            self._recompute(passage, plan.missing_tokens)

    async def prefill(self, passage: Passage, engine: Engine, inputs: RouteInputs) -> None:
        """The prefill leg and its landing; where both fail, decode recomputes within the budget.

        An engine that refuses connections has computed nothing, so another takes the leg. After
        any other failure decode does without, while the budget allows, else another engine.
        """
        tried = {engine}
        while True:
            try:
                await self._prefill_on(passage, engine, inputs)
                return
            except LegFailed as failed:
                if passage.provided:
                    return
                left = [e for e in inputs.prefill if e not in tried and e.identity is not None]
                others = elsewhere(left, tried)
                again = bool(others) and len(tried) < MAX_ATTEMPTS
                passage.error = str(failed)
                if not (again and failed.failure is Failure.REFUSED):
                    missing = passage.plan.missing_tokens if passage.plan else 0
                    passage.grant = self._budget.take(missing)
                    if passage.grant is not None:
                        return
                if not again:
                    raise self._over_budget() from None
            decode = inputs.decode if passage.plan is None else (passage.plan.decode,)
            plan = self._policy.plan(without(inputs, prefill=others, decode=decode))
            if plan.prefill is None:
                self._recompute(passage, plan.missing_tokens)
                return
            engine = plan.prefill
            if passage.plan is not None:
                passage.plan = replace(
                    passage.plan, prefill=engine, prefill_tokens=plan.prefill_tokens
                )
            tried.add(engine)

    async def _prefill_on(self, passage: Passage, engine: Engine, inputs: RouteInputs) -> None:
        await self._prefill_leg(passage, engine)
        handoff = passage.handoff
        if handoff is not None and handoff.transfer_params is not None:
            lease_s = self._legs.family(engine).lease_s
            passage.pinned = pinned(handoff.transfer_params, lease_s)
        missing = await self._handover.land(passage, engine)
        if missing:
            self._recompute(passage, missing)

    async def _prefill_leg(
        self, passage: Passage, engine: Engine, meeting: Meeting | None = None
    ) -> None:
        request, plan, places = passage.request, passage.plan, passage.places
        assert request is not None
        assert plan is not None
        assert places is not None
        passage.prefill_engine = engine.address
        priority = self._priorities.of(request, engine, plan.prefill_tokens)
        places.begin(Role.PREFILL, engine, plan.prefill_tokens)
        begun_s = monotonic()
        span, fields = passage.leg("kvrouter.prefill", engine)
        try:
            passage.handoff = await self._legs.prefill(
                engine,
                request,
                fields if meeting is None else without_rank(fields),
                prompt_ids=passage.prompt_ids,
                want_ids=meeting is None and request.ids is None and passage.tokens is None,
                meeting=meeting,
                priority=priority,
            )
        finally:
            places.leave(Role.PREFILL)
            passage.prefilled_s = monotonic()
            if span is not None:
                span.end()
        self._metrics.prefill.observe(passage.prefilled_s - begun_s)
        if passage.handoff.cached_tokens:
            self._metrics.cached_tokens[()] += passage.handoff.cached_tokens
        self._policy.leg_done(engine, Role.PREFILL, plan.missing_tokens)
        self._survey.computed(engine, passage.hashes)

    async def decode(
        self,
        passage: Passage,
        model: str,
        engine: Engine,
        inputs: RouteInputs,
        coming: Coming | None,
    ) -> None:
        """The decode leg, on another engine as long as the client has seen nothing of it.

        With `coming` the prefill leg is still to be done: the first engine gets both at once.
        """
        tried: list[tuple[Engine, int]] = []
        while True:
            tried.append((engine, engine.joins))
            try:
                if coming is None or not await self._both(passage, engine, coming, inputs):
                    await self._decode_on(passage, engine)
                return
            except LegFailed as failed:
                passage.error = str(failed)
                if len(tried) >= MAX_ATTEMPTS:
                    raise decode_error(failed) from None
                others = await self._others(model, tried, failed)
                if not others:
                    raise decode_error(failed) from None
                taken = failed.failure not in NOT_TAKEN
            inputs, coming = without(inputs, decode=others, prefill=()), None
            engine = self._policy.plan(inputs).decode
            handoff = passage.handoff
            handed = handoff is not None and handoff.transfer_params is not None
            if handed and (taken or spent(passage, engine)):
                await self._hand_over_anew(passage, model, engine, inputs)

    async def _hand_over_anew(
        self, passage: Passage, model: str, decode: Engine, inputs: RouteInputs
    ) -> None:
        """Another prefill leg: what the engine that failed was handed it may have fetched already.

        Then its memory is somebody else's, and who fetches it now gets wrong KV without an error.
        What that engine did not fetch it has freed itself, or the lease ends.
        """
        passage.handoff = passage.pinned = None
        prefill = self._pool.engines(Role.PREFILL, model)
        inputs = without(inputs, decode=(decode,), prefill=prefill)
        plan = passage.plan = self._policy.plan(inputs)
        self._reserve(passage, plan)
        if plan.prefill is not None:
            await self.prefill(passage, plan.prefill, inputs)
        else:
            self._recompute(passage, plan.missing_tokens)

    async def _others(
        self, model: str, tried: Sequence[tuple[Engine, int]], failed: LegFailed
    ) -> Sequence[Engine]:
        """Engines for another try: those not tried since they joined, waited for if none is there.

        The only engine is asked again where its connection broke: if it is gone it will refuse.
        """

        def look() -> list[Engine]:
            ready = self._pool.engines(Role.DECODE, model)
            return [
                e
                for e in ready
                if (e, e.joins) not in tried and (e.identity is None or e.identity.alone)
            ]

        others, ready = look(), self._pool.engines(Role.DECODE, model)
        if others:
            return elsewhere(others, (engine for engine, _ in tried))
        if ready:
            again = failed.failure is Failure.BROKEN and failed.engine in ready
            return [failed.engine] if again else []
        return await self._standby.until(look)

    def _both(
        self, passage: Passage, engine: Engine, coming: Coming, inputs: RouteInputs
    ) -> Awaitable[bool]:
        assert passage.plan is not None
        assert passage.plan.prefill is not None
        prefill = self.prefill(passage, passage.plan.prefill, inputs)
        decode = partial(self._decode_on, passage, engine, coming)
        return self._ahead.serve(passage, coming, prefill, decode)

    async def _decode_on(
        self,
        passage: Passage,
        engine: Engine,
        coming: Coming | None = None,
        meeting: Meeting | None = None,
    ) -> None:
        request, places = passage.request, passage.places
        assert request is not None
        assert places is not None
        passage.attempts += 1
        passage.decode_engine = engine.address
        load = _decode_tokens(request), _computing(passage)
        places.begin(Role.DECODE, engine, *load)
        begun_s = monotonic()
        span, fields = passage.leg("kvrouter.decode", engine)
        answer: Answer | None = None
        try:
            answer = await self._legs.decode(
                engine,
                request,
                fields,
                passage.handoff,
                prompt_ids=passage.prompt_ids,
                coming=coming,
                meeting=meeting,
                want_ids=passage.names_tokens,
            )
            passage.pinned = None
            if request.stream:
                await passage.outlet.stream(passage, engine, answer)
            else:
                passage.outlet.whole(passage, await self._legs.read(engine, answer))
        except Refused:
            passage.pinned = None  # an engine that refuses frees what it was handed
            raise
        finally:
            places.leave(Role.DECODE)
            if answer is not None:
                answer.close()
            if span is not None:
                passage.end_decode(span)
        self._metrics.decode.observe(monotonic() - begun_s)
        if passage.outcome != "broken":  # within a stream: counted as failed already
            self._decoded(passage, engine, spared=coming is not None or meeting is not None)

    def _decoded(self, passage: Passage, engine: Engine, *, spared: bool) -> None:
        """An engine did its decode leg well; `spared`: it was given KV that was on its way."""
        self._pool.succeeded(engine)
        spared = spared or passage.handoff is not None or passage.plan is None
        missing = 0 if spared or passage.plan is None else passage.plan.missing_tokens
        self._policy.leg_done(engine, Role.DECODE, missing)
        self._survey.computed(engine, passage.hashes)

    def _recompute(self, passage: Passage, tokens: int) -> None:
        """Let decode compute `tokens` of the prompt, if the fleet's budget allows.

        Raises:
            ApiError: 429: it does not.
        """
        if tokens <= 0 or passage.grant is not None or passage.provided:
            return
        passage.grant = self._budget.take(tokens)
        if passage.grant is None:
            raise self._over_budget()

    def _over_budget(self) -> ApiError:
        return ApiError(
            429,
            "The KV of this prompt is not available and the engines have no room to compute it.",
            retry_after_s=self._budget.retry_after_s,
        )


def _decode_tokens(request: Request | None) -> int:
    """The load of a decode leg: tokens of its prompt, and those that it will generate at most."""
    assert request is not None
    generated = request.max_tokens or OPEN_ENDED_TOKENS
    return request.prompt_tokens + generated * request.n


def _computing(passage: Passage) -> int:
    """Tokens of the prompt that its decode engine will compute, as far as is known by now."""
    plan, grant = passage.plan, passage.grant
    if plan is None or plan.prefill is not None:
        return grant.tokens if grant is not None else 0
    return plan.missing_tokens
