"""The legs of one prompt: planned, prefilled, landed, decoded; other engines where one fails.

Knows no client: what an engine answers goes to the context's outlet.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Final

from kvrouter.engines.compatibility import on_other_servers, partners
from kvrouter.engines.engine import Role
from kvrouter.engines.families.base import LegOrder
from kvrouter.errors import ApiError
from kvrouter.http.failure import Failure
from kvrouter.routing.plan import loaders
from kvrouter.routing.reservations import LegReservations
from kvrouter.serving.legs.concurrent import ConcurrentLegs
from kvrouter.serving.legs.leg import MAX_ATTEMPTS, NOT_TAKEN, LegFailed, Refused, decode_error
from kvrouter.serving.legs.release import pinned, spent
from kvrouter.serving.request.forwarded_headers import without_rank
from kvrouter.serving.request.request_metrics import note_plan

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from kvrouter.admission.recompute_budget import RecomputeBudget
    from kvrouter.admission.waiting import EngineWait
    from kvrouter.engines.engine import Engine
    from kvrouter.engines.families import Families
    from kvrouter.engines.families.base import Family, PendingKv, Rendezvous
    from kvrouter.engines.pool import EnginePool
    from kvrouter.http.client.pool import EngineResponse
    from kvrouter.openai.request import Request
    from kvrouter.prefix.in_flight import InFlightPrefixes
    from kvrouter.routing.plan import Plan, RouteInputs
    from kvrouter.routing.policies.base import Policy
    from kvrouter.routing.prefill_priority import PrefillPriorities
    from kvrouter.serving.legs.decode_ahead import DecodeAhead
    from kvrouter.serving.legs.inputs import InputsBuilder
    from kvrouter.serving.legs.landing import LandingWaiter
    from kvrouter.serving.legs.leg import Legs
    from kvrouter.serving.legs.release import Releases
    from kvrouter.serving.request.context import RequestContext
    from kvrouter.telemetry.metrics import Metrics

OPEN_ENDED_TOKENS: Final = 256
"""Tokens that a request without max_tokens is taken to generate, for load alone."""


class Orchestrator:
    """Takes prompts through their legs on the engines of a pool, each in its caller's task.

    Cancelling closes the leg under way and gives back its ticket; lease and grant stay the
    context's, whose owner releases them.

    Args:
        pool: the engines.
        policy: chooses among them.
        inputs_builder: gathers what it decides upon.
        families: say in which order an engine's legs go.
        legs: asks engines.
        landing_waiter: awaits landings.
        ahead: sends decode legs ahead of them.
        budget: bounds what decode engines may compute for want of KV.
        engine_wait: where requests wait for an engine.
        releases: frees what prefill engines hold for decode legs that do not come.
        priorities: ranks prefill legs.
        expected: is told which engines will hold which blocks.
        metrics: counts and times.
    """

    def __init__(
        self,
        *,
        pool: EnginePool,
        policy: Policy,
        inputs_builder: InputsBuilder,
        families: Families,
        legs: Legs,
        landing_waiter: LandingWaiter,
        ahead: DecodeAhead,
        budget: RecomputeBudget,
        engine_wait: EngineWait,
        releases: Releases,
        priorities: PrefillPriorities,
        expected: InFlightPrefixes,
        metrics: Metrics,
    ) -> None:
        self._pool = pool
        self._policy = policy
        self._inputs_builder = inputs_builder
        self._families = families
        self._legs = legs
        self._pairs = ConcurrentLegs(pool, policy, families, releases, engine_wait)
        self._landing_waiter = landing_waiter
        self._ahead = ahead
        self._budget = budget
        self._engine_wait = engine_wait
        self._releases = releases
        self._priorities = priorities
        self._expected = expected
        self._metrics = metrics

    def needs_legs_per_sample(self, request: Request, model: str) -> Family | None:
        """The family of engines that may decode `request` and take one sample per hand-over."""
        families = (self._families.of(e) for e in self._pool.engines(Role.DECODE, model))
        return next((family for family in families if family.needs_legs_per_sample(request)), None)

    def reports_tokens(self, request: Request, model: str) -> bool:
        """Whether some engine that may decode `request` can name the tokens of its stream."""
        engines = self._pool.engines(Role.DECODE, model)
        return any(self._families.of(engine).reports_tokens(request) for engine in engines)

    async def run(self, context: RequestContext, model: str) -> None:
        """Take the prompt of `context.request` from its plan to the end of its answer.

        Raises:
            ApiError: no engine can do it, or none has room.
            Refused: an engine refused the request itself.
        """
        decode = self._pool.engines(Role.DECODE, model)
        if not decode:
            since_s = monotonic()
            decode = await self._engine_wait.until(lambda: self._pool.engines(Role.DECODE, model))
            context.waited(since_s, "engine")
        if not decode:
            raise ApiError(503, "No decode engine is available.", retry_after_s=1)
        prefill = self._pool.engines(Role.PREFILL, model)
        inputs = await self._inputs_builder.inputs(context, model, decode, prefill)
        plan = context.route.plan = self._policy.plan(inputs)
        context.timing.planned_s = monotonic()
        note_plan(context, inputs, self._metrics)
        places = self._reserve(context, plan)
        try:
            if self._families.of(plan.decode).order is LegOrder.CONCURRENT:
                await self._at_once(context, model, inputs)
                return
            pending = self._ahead.announce(context)
            if plan.prefill is not None and pending is None:
                await self.prefill(context, plan.prefill, inputs)
                self._rebind(context, model, inputs)
            elif pending is None:
                self._compute_alone(context, plan)
            await self.decode(context, model, context.route.plan.decode, inputs, pending)
        finally:
            places.release()
            if context.held.pinned is not None:
                self._releases.begin(context, model)

    def _reserve(self, context: RequestContext, plan: Plan) -> LegReservations:
        """Count the legs of `plan` on their engines: prompts planned meanwhile see the load."""
        places = context.route.places
        if places is None:
            places = context.route.places = LegReservations(
                self._pool, self._expected, context.prompt.hashes
            )
        if plan.prefill is not None:
            places.plan(Role.PREFILL, plan.prefill, plan.prefill_tokens)
        else:
            places.leave(Role.PREFILL)
        load = _decode_tokens(context.request), _computing(context)
        places.plan(Role.DECODE, plan.decode, *load)
        return places

    def _rebind(self, context: RequestContext, model: str, inputs: RouteInputs) -> None:
        """Choose the decode engine again where others can load the KV too: loads have changed.

        `context.route.plan` has the engine and `context.route.places` its load then.
        """
        plan, places, handoff = context.route.plan, context.route.places, context.route.handoff
        assert plan is not None
        assert plan.prefill is not None
        assert places is not None
        if handoff is None or self._families.of(plan.decode).order is not LegOrder.STORE:
            return
        if not self._landing_waiter.loadable_anywhere(context):
            return
        ready = self._pool.engines(Role.DECODE, model)
        engines = loaders(ready, plan.prefill.family, handoff.manifest)
        if not engines or (len(engines) == 1 and engines[0] is plan.decode):
            return
        engine = self._policy.rebind(inputs, engines, plan.decode, places.tokens(Role.DECODE))
        if engine is not plan.decode and partners((plan.prefill,), engine, inputs.model):
            context.route.plan = replace(plan, decode=engine)
            self._metrics.rebound[()] += 1
            places.plan(Role.DECODE, engine, _decode_tokens(context.request))

    async def _at_once(self, context: RequestContext, model: str, inputs: RouteInputs) -> None:
        """Both legs together; where no prefill engine can do its part, decode alone."""
        left = await self._pairs.serve(
            context, model, inputs, prefill=self._prefill_leg, decode=self._decode_on
        )
        plan = context.route.plan
        if left is not None and plan is not None:
            self._reserve(context, plan)
            if context.outcome.error:
                self._recompute(context, plan.missing_tokens)
            self._compute_alone(context, plan)
            await self.decode(context, model, plan.decode, left, None)

    def _compute_alone(self, context: RequestContext, plan: Plan) -> None:
        """Count what decode computes because there is no prefill engine, where there should be one.

        Raises:
            ApiError: 429: it is too much.
        """
        if plan.why == "no prefill engine" and self._pool.has_role(Role.PREFILL):
            self._recompute(context, plan.missing_tokens)

    async def prefill(self, context: RequestContext, engine: Engine, inputs: RouteInputs) -> None:
        """The prefill leg and its landing; where both fail, decode recomputes within the budget.

        An engine that refuses connections has computed nothing, so another takes the leg. After
        any other failure decode does without, while the budget allows, else another engine.
        """
        tried = {engine}
        while True:
            try:
                await self._prefill_on(context, engine)
                return
            except LegFailed as failed:
                if context.provided:
                    return
                left = [e for e in inputs.prefill if e not in tried and e.identity is not None]
                others = on_other_servers(left, tried)
                again = bool(others) and len(tried) < MAX_ATTEMPTS
                context.outcome.error = str(failed)
                if not (again and failed.failure is Failure.REFUSED):
                    missing = context.route.plan.missing_tokens if context.route.plan else 0
                    context.held.grant = self._budget.take(missing)
                    if context.held.grant is not None:
                        return
                if not again:
                    raise self._over_budget() from None
            decode = inputs.decode if context.route.plan is None else (context.route.plan.decode,)
            plan = self._policy.plan(replace(inputs, prefill=others, decode=decode))
            if plan.prefill is None:
                self._recompute(context, plan.missing_tokens)
                return
            engine = plan.prefill
            if context.route.plan is not None:
                context.route.plan = replace(
                    context.route.plan, prefill=engine, prefill_tokens=plan.prefill_tokens
                )
            tried.add(engine)

    async def _prefill_on(self, context: RequestContext, engine: Engine) -> None:
        await self._prefill_leg(context, engine)
        handoff = context.route.handoff
        if handoff is not None and handoff.transfer_params is not None:
            lease_s = self._families.of(engine).lease_s
            context.held.pinned = pinned(handoff.transfer_params, lease_s)
        missing = await self._landing_waiter.land(context, engine)
        if missing:
            self._recompute(context, missing)

    async def _prefill_leg(
        self, context: RequestContext, engine: Engine, rendezvous: Rendezvous | None = None
    ) -> None:
        request, plan, places = context.request, context.route.plan, context.route.places
        assert request is not None
        assert plan is not None
        assert places is not None
        context.route.prefill_engine = engine.address
        priority = self._priorities.of(request, engine, plan.prefill_tokens)
        places.begin(Role.PREFILL, engine, plan.prefill_tokens)
        begun_s = monotonic()
        span, fields = context.leg("kvrouter.prefill", engine)
        try:
            context.route.handoff = await self._legs.prefill(
                engine,
                request,
                fields if rendezvous is None else without_rank(fields),
                prompt_ids=context.prompt.ids,
                want_ids=rendezvous is None
                and request.ids is None
                and context.prompt.tokens is None,
                rendezvous=rendezvous,
                priority=priority,
            )
        finally:
            places.leave(Role.PREFILL)
            context.timing.prefilled_s = monotonic()
            if span is not None:
                span.end()
        self._metrics.prefill.observe(context.timing.prefilled_s - begun_s)
        if context.route.handoff.cached_tokens:
            self._metrics.cached_tokens[()] += context.route.handoff.cached_tokens
        self._inputs_builder.computed(engine, context.prompt.hashes)

    async def decode(
        self,
        context: RequestContext,
        model: str,
        engine: Engine,
        inputs: RouteInputs,
        pending: PendingKv | None,
    ) -> None:
        """The decode leg, on another engine as long as the client has seen nothing of it.

        With `pending` the prefill leg is still to be done: the first engine gets both at once.
        """
        tried: list[tuple[Engine, int]] = []
        while True:
            tried.append((engine, engine.joins))
            try:
                if pending is None or not await self._both(context, engine, pending, inputs):
                    await self._decode_on(context, engine)
                return
            except LegFailed as failed:
                context.outcome.error = str(failed)
                if len(tried) >= MAX_ATTEMPTS:
                    raise decode_error(failed) from None
                others = await self._others(model, tried, failed)
                if not others:
                    raise decode_error(failed) from None
                taken = failed.failure not in NOT_TAKEN
            inputs, pending = replace(inputs, decode=others, prefill=()), None
            engine = self._policy.plan(inputs).decode
            handoff = context.route.handoff
            handed = handoff is not None and handoff.transfer_params is not None
            if handed and (taken or spent(context, engine)):
                await self._hand_over_anew(context, model, engine, inputs)

    async def _hand_over_anew(
        self, context: RequestContext, model: str, decode: Engine, inputs: RouteInputs
    ) -> None:
        """Another prefill leg: what the engine that failed was handed it may have fetched already.

        Then its memory is somebody else's, and who fetches it now gets wrong KV without an error.
        What that engine did not fetch it has freed itself, or the lease ends.
        """
        context.route.handoff = context.held.pinned = None
        prefill = self._pool.engines(Role.PREFILL, model)
        inputs = replace(inputs, decode=(decode,), prefill=prefill)
        plan = context.route.plan = self._policy.plan(inputs)
        self._reserve(context, plan)
        if plan.prefill is not None:
            await self.prefill(context, plan.prefill, inputs)
        else:
            self._recompute(context, plan.missing_tokens)

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
                if (e, e.joins) not in tried and (e.identity is None or e.identity.can_serve_whole)
            ]

        others, ready = look(), self._pool.engines(Role.DECODE, model)
        if others:
            return on_other_servers(others, (engine for engine, _ in tried))
        if ready:
            again = failed.failure is Failure.BROKEN and failed.engine in ready
            return [failed.engine] if again else []
        return await self._engine_wait.until(look)

    def _both(
        self, context: RequestContext, engine: Engine, pending: PendingKv, inputs: RouteInputs
    ) -> Awaitable[bool]:
        assert context.route.plan is not None
        assert context.route.plan.prefill is not None
        prefill = self.prefill(context, context.route.plan.prefill, inputs)
        decode = partial(self._decode_on, context, engine, pending)
        return self._ahead.serve(context, pending, prefill, decode)

    async def _decode_on(
        self,
        context: RequestContext,
        engine: Engine,
        pending: PendingKv | None = None,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        request, places = context.request, context.route.places
        assert request is not None
        assert places is not None
        context.route.attempts += 1
        context.route.decode_engine = engine.address
        load = _decode_tokens(request), _computing(context)
        places.begin(Role.DECODE, engine, *load)
        begun_s = monotonic()
        span, fields = context.leg("kvrouter.decode", engine)
        answer: EngineResponse | None = None
        try:
            answer = await self._legs.decode(
                engine,
                request,
                fields,
                context.route.handoff,
                prompt_ids=context.prompt.ids,
                pending=pending,
                rendezvous=rendezvous,
                want_ids=context.reports_tokens,
            )
            context.held.pinned = None
            if request.stream:
                await context.sink.stream(context, engine, answer)
            else:
                context.sink.whole(context, await self._legs.read(engine, answer))
        except Refused:
            context.held.pinned = None  # an engine that refuses frees what it was handed
            raise
        finally:
            places.leave(Role.DECODE)
            if answer is not None:
                answer.close()
            if span is not None:
                context.end_decode(span)
        self._metrics.decode.observe(monotonic() - begun_s)
        if context.outcome.reason != "broken":  # within a stream: counted as failed already
            self._pool.succeeded(engine)
            self._inputs_builder.computed(engine, context.prompt.hashes)

    def _recompute(self, context: RequestContext, tokens: int) -> None:
        """Let decode compute `tokens` of the prompt, if the fleet's budget allows.

        Raises:
            ApiError: 429: it does not.
        """
        if tokens <= 0 or context.held.grant is not None or context.provided:
            return
        context.held.grant = self._budget.take(tokens)
        if context.held.grant is None:
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


def _computing(context: RequestContext) -> int:
    """Tokens of the prompt that its decode engine will compute, as far as is known by now."""
    plan, grant = context.route.plan, context.held.grant
    if plan is None or plan.prefill is not None:
        return grant.tokens if grant is not None else 0
    return plan.missing_tokens
