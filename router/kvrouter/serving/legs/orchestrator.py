"""The legs of one prompt: planned, prefilled, landed, decoded; another engine if one fails.

Knows no client: what an engine answers goes to a sink.

Promises: nothing runs on when `run` returns or is cancelled, and all load is given back. A second
decode engine is asked only while the client has seen nothing; KV that was handed over is fetched
once (`_needs_prefill_again`). What decode computes for want of KV is charged to the recompute
budget, on every way: each way that was forgotten (a hand-over that failed, a prefix whose engine
died) let decode engines work as prefill engines. Tried: to choose the decode engine at the plan
alone. The busiest of four engines then had 1.83 times the mean load; chosen again at the landing
(`_rebind`), 1.15 times.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import monotonic
from typing import TYPE_CHECKING

from kvrouter.engines.compatibility import partners
from kvrouter.engines.engine import Engine, Role
from kvrouter.engines.families.base import Handoff, LegOrder, PendingKv
from kvrouter.errors import ApiError
from kvrouter.http.failure import Failure
from kvrouter.routing.plan import LegReservations, Plan, RouteInputs, Why, loaders
from kvrouter.serving.legs import failures
from kvrouter.serving.legs.early import serves_whole
from kvrouter.serving.legs.failures import LegFailed, Tried, answer_of, note
from kvrouter.serving.legs.inputs import InputsBuilder, note_plan
from kvrouter.serving.legs.leg import Legs, computing_tokens, decode_tokens
from kvrouter.serving.legs.release import Releases, spent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrouter.admission.waiting import EngineWait
    from kvrouter.engines.families import Families
    from kvrouter.engines.pool import EnginePool
    from kvrouter.prefix.in_flight import InFlightPrefixes
    from kvrouter.routing.policies.base import Policy
    from kvrouter.serving.legs.early import ConcurrentLegs, DecodeAhead
    from kvrouter.serving.legs.planning import PrefillQueueWait
    from kvrouter.serving.legs.prefill import LandingWaiter, PrefillPhase
    from kvrouter.serving.request.context import RequestContext, ResponseSink
    from kvrouter.serving.request.limits import ServingLimits
    from kvrouter.telemetry.metrics import Metrics


@dataclass(eq=False, slots=True, kw_only=True)
class Orchestrator:
    """Takes prompts through their legs, each in its caller's task.

    Cancelling closes the leg that runs and gives back its load; lease and grant stay the
    context's, whose owner releases them.
    """

    pool: EnginePool
    policy: Policy  # chooses among them
    queue: PrefillQueueWait | None  # plans prompts when their turn has come; None: at once
    families: Families  # say in which order an engine's legs go
    inputs_builder: InputsBuilder  # gathers what the policy decides upon
    legs: Legs  # does single legs
    prefill_phase: PrefillPhase  # does prefill legs with their landing
    ahead: DecodeAhead | None  # sends decode legs before their landing; None: each goes after it
    concurrent: ConcurrentLegs  # sends both legs at once, for families that want that
    landing_waiter: LandingWaiter  # knows what any decode engine can load
    engine_wait: EngineWait  # where requests wait for an engine
    releases: Releases  # frees what prefill engines keep for decode legs that do not come
    in_flight: InFlightPrefixes  # notes which engines will hold which blocks
    limits: ServingLimits
    metrics: Metrics  # counts plans

    async def run(self, context: RequestContext, sink: ResponseSink) -> None:
        """Take the prompt of `context` from its plan to the end of its answer, which `sink` gets.

        Raises:
            ApiError: no engine can do it, or none has room.
            Refused: an engine refused the request itself.
        """
        decode = self.pool.engines(Role.DECODE, context.model)
        if not decode:
            decode = await self._wait_for_decode(context)
        prefill = self.pool.engines(Role.PREFILL, context.model)
        inputs = await self.inputs_builder.inputs(context, decode, prefill)
        try:
            if self.queue is not None:
                plan = await self.queue.plan(context, inputs, lambda p: self._bind(context, p))
            else:
                plan = self._bind(context, self.policy.plan(inputs))
            context.timing.planned()
            note_plan(context, plan, inputs, self.metrics)
            if self.families.of(plan.decode).order is LegOrder.CONCURRENT:
                await self._run_concurrently(context, sink, plan, inputs)
                return
            pending = None
            if plan.prefill is None:
                self._count_missing_prefill(context, plan)
            elif self.ahead is None or (pending := self.ahead.announce(context, plan)) is None:
                await self.prefill_phase.run(context, inputs, plan)
                self._rebind(context, inputs)
            await self._decode(context, sink, inputs, pending)
        finally:
            if context.route.reservations is not None:
                context.route.reservations.release()
            if context.resources.pinned is not None:
                self.releases.begin(context)

    async def _wait_for_decode(self, context: RequestContext) -> Sequence[Engine]:
        since_s, model = monotonic(), context.model
        decode = await self.engine_wait.until(lambda: self.pool.engines(Role.DECODE, model), model)
        context.waited(since_s, "engine")
        if not decode:
            raise ApiError(503, "No decode engine is available.", retry_after_s=1)
        return decode

    def _bind(self, context: RequestContext, plan: Plan) -> Plan:
        """The legs run as `plan` says, and count on their engines from now on. Returns it."""
        context.route.follow(plan)
        chain = context.prompt.hashes or context.prompt.learnt
        reservations = context.route.reservations
        if reservations is None:
            reservations = LegReservations(self.pool, self.in_flight, chain)
            context.route.reserve(reservations)
        if plan.prefill is not None:
            tokens, work_s = plan.computed_tokens, plan.work_s
            reservations.plan(Role.PREFILL, plan.prefill, tokens, work_s=work_s)
            if plan.prefill in plan.decode.pairs:
                failures.begin_pair(context, self.pool, plan)
        else:
            reservations.end(Role.PREFILL)
        load = decode_tokens(context.request), computing_tokens(context)
        reservations.plan(Role.DECODE, plan.decode, *load)
        return plan

    def _rebind(self, context: RequestContext, inputs: RouteInputs) -> None:
        """Choose the decode engine again, if others can load the KV too: loads have changed."""
        route = context.route
        plan, handoff, reservations = route.plan, route.handoff, route.reservations
        if plan is None or plan.prefill is None or handoff is None or reservations is None:
            return
        engines = self._able_to_load(context, plan, plan.prefill, handoff)
        if not engines or (len(engines) == 1 and engines[0] is plan.decode):
            return
        engine = self.policy.rebind(inputs, engines, plan.decode, reservations.tokens(Role.DECODE))
        if engine is not plan.decode and partners((plan.prefill,), engine, inputs.model):
            context.route.follow(replace(plan, decode=engine))
            self.metrics.rebound[()] += 1
            reservations.plan(Role.DECODE, engine, decode_tokens(context.request))

    def _able_to_load(
        self, context: RequestContext, plan: Plan, prefill: Engine, handoff: Handoff
    ) -> Sequence[Engine]:
        """Decode engines that can load what `prefill` handed over, if any can."""
        by_store = self.families.of(plan.decode).order is LegOrder.STORE
        if not by_store or not self.landing_waiter.loadable_anywhere(context):
            return ()
        ready = self.pool.engines(Role.DECODE, context.model)
        return loaders(ready, prefill.family, handoff.manifest or prefill.manifest)

    async def _run_concurrently(
        self, context: RequestContext, sink: ResponseSink, plan: Plan, inputs: RouteInputs
    ) -> None:
        """Both legs at once; if no prefill engine can do its part, decode alone."""
        left = await self.concurrent.run(context, sink, plan, inputs)
        if left is None:
            return
        inputs, plan, refused = left
        self._bind(context, plan)
        if context.outcome.error or refused is not None:
            self.prefill_phase.recompute(context, plan.missing_tokens, refused)
        self._count_missing_prefill(context, plan)
        await self._decode(context, sink, inputs, None)

    def _count_missing_prefill(self, context: RequestContext, plan: Plan) -> None:
        """Count what decode computes because a prefill engine that should be there is not.

        Raises:
            ApiError: 429: it is too much.
        """
        if plan.why is Why.NO_PREFILL_ENGINE and self.pool.has_role(Role.PREFILL, context.model):
            self.prefill_phase.recompute(context, plan.missing_tokens)

    async def _decode(
        self,
        context: RequestContext,
        sink: ResponseSink,
        inputs: RouteInputs,
        pending: PendingKv | None,
    ) -> None:
        """The decode leg, on another engine as long as the client has seen nothing of it.

        With `pending` the prefill leg is still to be done: the first engine gets both at once.
        """
        plan = context.route.plan
        assert plan is not None
        engine = plan.decode
        tried = Tried()
        while True:
            tried.append((engine, engine.joins))
            try:
                ahead = self.ahead
                if pending and ahead and await ahead.run(context, sink, plan, inputs, pending):
                    return
                await self.legs.decode(context, sink, engine)
                return
            except LegFailed as failed:
                again = note(context, failed)
                others = await self._others(context.model, tried, failed) if again else ()
                if not (others := others or failures.last_try(context, failed)):
                    raise answer_of(context) from None
                taken = failed.taken
            inputs, pending = replace(inputs, decode=others, prefill=()), None
            engine = self.policy.plan(inputs).decode
            if self._needs_prefill_again(context, engine, taken=taken):
                await self._prefill_again(context, engine, inputs)

    def _needs_prefill_again(self, context: RequestContext, engine: Engine, *, taken: bool) -> bool:
        """Whether `engine`, which takes the decode leg from another one, needs a prefill leg first.

        | KV of the first decode engine       | and                                | again |
        |-------------------------------------|------------------------------------|-------|
        | fetched from a prefill engine       | the first one may have `taken` it  | yes   |
        |                                     | `engine` cannot fetch it any more  | yes   |
        |                                     | it is still there                  | no    |
        | loaded from the store               | any engine can load it             | no    |
        | its own (plan without prefill leg)  | `engine` may lack it               | yes   |
        |                                     | both legs went at once, and failed | no    |
        """
        plan, handoff = context.route.plan, context.route.handoff
        if handoff is not None and handoff.transfer_params is not None:
            return taken or spent(context, engine)
        if plan is None or plan.prefill is not None:
            return False
        return self.families.of(plan.decode).order is not LegOrder.CONCURRENT

    async def _prefill_again(
        self, context: RequestContext, decode: Engine, inputs: RouteInputs
    ) -> None:
        """Plan both legs for another decode engine.

        After a hand-over, because the engine that failed may have fetched the KV already. Then the
        memory belongs to another request, and an engine that fetches it now gets wrong KV without
        an error. KV that was not fetched was freed by the engine, or its lease ends.

        Raises:
            ApiError: 429: decode would have to compute more than the budget allows.
        """
        handed = context.route.handoff is not None
        context.route.note_handoff(None)
        context.resources.unpin()
        prefill = failures.other_sources(context, self.pool.engines(Role.PREFILL, context.model))
        inputs = replace(inputs, decode=(decode,), prefill=prefill)
        plan = self._bind(context, self.policy.plan(inputs))
        if plan.prefill is not None:
            await self.prefill_phase.run(context, inputs, plan)
        elif handed:
            self.prefill_phase.recompute(context, plan.missing_tokens)
        else:
            self._count_missing_prefill(context, plan)

    async def _others(self, model: str, tried: Tried, failed: LegFailed) -> Sequence[Engine]:
        """Engines for another try: those not tried since they joined; waits if none is there.

        The only engine is asked again if its connection broke: if it is gone it will refuse.
        """

        def look() -> Sequence[Engine]:
            return tried.others(filter(serves_whole, self.pool.engines(Role.DECODE, model)))

        if len(tried) >= self.limits.max_attempts:
            return ()
        if others := look():
            return others
        ready = self.pool.engines(Role.DECODE, model)
        if not ready:
            return await self.engine_wait.until(look, model)
        broken = failed.failure is Failure.BROKEN and failed.engine in ready
        return [failed.engine] if broken else ()
