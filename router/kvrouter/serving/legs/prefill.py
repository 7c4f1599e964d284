"""The prefill leg with its landing, on another engine if one fails; else decode recomputes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvrouter.engines.compatibility import on_other_servers
from kvrouter.errors import ApiError
from kvrouter.serving.legs.failures import LegFailed, Refused, Retries, answer_of, note

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrouter.admission.recompute_budget import RecomputeBudget
    from kvrouter.engines.engine import Engine
    from kvrouter.engines.families import Families
    from kvrouter.routing.plan import Plan, RouteInputs
    from kvrouter.routing.policies.base import Policy
    from kvrouter.serving.legs.landing import LandingWaiter
    from kvrouter.serving.legs.leg import Legs
    from kvrouter.serving.request.context import RequestContext


@dataclass(eq=False, slots=True, kw_only=True)
class PrefillPhase:
    """Brings a prompt's KV to where its decode engine loads it from."""

    policy: Policy  # chooses other engines
    families: Families  # say how long an engine keeps what it hands over
    legs: Legs
    landing_waiter: LandingWaiter
    budget: RecomputeBudget  # bounds what decode engines may compute for want of KV
    retries: Retries

    async def run(self, context: RequestContext, inputs: RouteInputs, plan: Plan) -> None:
        """Prefill the prompt as `plan` says, which names a prefill engine, and await its landing.

        An engine that cannot be reached or is full has computed nothing, so another takes the
        leg. After other failures decode computes, while the budget allows, else another engine.
        After a refusal too: the router's own one token may be what the engine refuses.

        Raises:
            ApiError: 429: the budget does not allow it; or no engine may be asked.
            Refused: an engine refused the request itself, and the budget is spent.
        """
        tried: list[Engine] = []
        while plan.prefill is not None:
            tried.append(plan.prefill)
            try:
                await self._prefill(context, plan.prefill, plan.computed_tokens)
                return
            except Refused as refused:
                self.recompute(context, plan.missing_tokens, refused)
                return
            except LegFailed as failed:
                if context.kv_ready:
                    return
                note(context, failed)
                if not failed.row.again:
                    raise answer_of(context) from None
                others = self._others(inputs, tried)
                computes = failed.row.begun or not others
                if computes and context.held.recompute(self.budget, plan.missing_tokens):
                    return
                if not others:
                    raise self._over_budget() from None
            found = self.policy.plan(replace(inputs, prefill=others, decode=(plan.decode,)))
            if found.prefill is None:
                self.recompute(context, found.missing_tokens)
                return
            plan = replace(plan, prefill=found.prefill, computed_tokens=found.computed_tokens)
            context.route.plan = plan

    def recompute(
        self, context: RequestContext, tokens: int, otherwise: ApiError | Refused | None = None
    ) -> None:
        """Let decode compute `tokens` of the prompt, if the fleet's budget allows.

        Raises:
            ApiError: 429: it does not. Or `otherwise`.
        """
        if tokens <= 0 or context.kv_ready or context.held.recompute(self.budget, tokens):
            return
        raise otherwise or self._over_budget()

    async def _prefill(self, context: RequestContext, engine: Engine, tokens: int) -> None:
        handoff = await self.legs.prefill(context, engine, tokens)
        if handoff.transfer_params is not None:
            context.held.pin(handoff.transfer_params, self.families.of(engine).lease_s)
        missing = await self.landing_waiter.land(context, engine, handoff)
        if missing:
            self.recompute(context, missing)

    def _others(self, inputs: RouteInputs, tried: list[Engine]) -> Sequence[Engine]:
        """Engines for another try; none if there were enough."""
        if len(tried) >= self.retries.max_attempts:
            return ()
        left = [e for e in inputs.prefill if e not in tried and e.identity is not None]
        return on_other_servers(left, tried)

    def _over_budget(self) -> ApiError:
        return ApiError(
            429,
            "The KV of this prompt is not available and the engines have no room to compute it.",
            retry_after_s=self.budget.retry_after_s,
        )
