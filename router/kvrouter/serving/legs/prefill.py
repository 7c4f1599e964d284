"""The prefill leg with its landing, on another engine if one fails; else decode recomputes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from time import monotonic
from typing import TYPE_CHECKING

from kvrouter.engines.engine import Engine, HashDomain
from kvrouter.engines.families.base import NothingLanded
from kvrouter.errors import ApiError
from kvrouter.prefix.stores.base import LandingOutcome, LandingResult, WantedBlocks
from kvrouter.routing.plan import usable_blocks
from kvrouter.serving.legs.failures import LegFailed, Refused, Tried, answer_of, note
from kvrouter.serving.legs.inputs import hash_prompt
from kvrouter_store.identity.chain import HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrouter.admission.held import RecomputeBudget
    from kvrouter.engines.families import Families
    from kvrouter.engines.families.base import Handoff
    from kvrouter.prefix.hash_cache import HashCache
    from kvrouter.prefix.stores.base import StoreView
    from kvrouter.routing.plan import Plan, RouteInputs
    from kvrouter.routing.policies.base import Policy
    from kvrouter.serving.legs.leg import Legs
    from kvrouter.serving.request.context import RequestContext
    from kvrouter.serving.request.limits import ServingLimits
    from kvrouter.telemetry.metrics import Metrics


@dataclass(eq=False, slots=True, kw_only=True)
class LandingWaiter:
    """Awaits landings."""

    store: StoreView | None  # the store; None: engines hand KV over among themselves
    hash_cache: HashCache
    limits: ServingLimits
    metrics: Metrics  # counts and times landings

    async def land(self, context: RequestContext, prefill: Engine, handoff: Handoff) -> int:
        """Wait for the KV that `prefill` promised in `handoff`, and lease it.

        Returns:
            tokens that decode will have to compute after all; 0 if all has landed, if decode
            fetches its KV from `prefill`, or if there is nothing that could be awaited.
        """
        if handoff.missing:
            self._nothing(context, NothingLanded.NOT_NAMED)
            return context.route.plan.missing_tokens if context.route.plan is not None else 0
        if self.store is None or context.timing.first_s or handoff.transfer_params is not None:
            return 0
        manifest, blocks = self.store.promised(handoff, prefill.identity)
        if manifest is None:
            if prefill.manifest is not None:
                self._nothing(context, NothingLanded.NOT_NAMED)
            return 0
        hashes = self.hashes(context, handoff)
        upto = min(blocks, len(hashes) // HASH_BYTES)
        if not upto:
            self._nothing(context, handoff.none_promised(blocks))
            return self._missing(context, handoff, 0) if handoff.manifest is not None else 0
        begun_s, node = monotonic(), handoff.node or prefill.node
        landing = await self._awaited(context, manifest, upto, node)
        if landing is None:
            chain = hashes[: upto * HASH_BYTES]
            landing = await self.wait(context, manifest, chain, self.limits.landing_timeout_s, node)
        context.note_landing(begun_s, landing)
        self.metrics.handoff.observe(context.timing.landed_s - begun_s)
        self.metrics.landings[landing.outcome.value] += 1
        if not landing.blocks:
            late = landing.outcome is LandingOutcome.TIMEOUT
            gone = late and context.prompt.stored_for(manifest).at(node)
            self._nothing(context, NothingLanded.EVICTED if gone else landing.outcome)
        return self._missing(context, handoff, context.route.landed_blocks or 0)

    def loadable_anywhere(self, context: RequestContext) -> bool:
        """Whether any decode engine of the manifest can load the prompt's KV as well as another.

        So it is once all that was awaited is in the store and leased. Without a store of the
        router's own it is taken for granted; what was handed over belongs to one decode engine.
        """
        handoff = context.route.handoff
        if handoff is None or handoff.missing or handoff.transfer_params is not None:
            return False
        if context.resources.grant_tokens is not None:
            return False
        return self.store is None or context.resources.leased

    async def _awaited(
        self, context: RequestContext, manifest: str, upto: int, node: str | None
    ) -> LandingResult | None:
        """The result of a wait that has begun, if the hand-off promises the same; else its end."""
        awaited = context.route.awaited
        if awaited is None:
            return None
        same = awaited.manifest == manifest and awaited.node in {None, node}
        waits = same and upto >= awaited.blocks and not awaited.task.done()
        if waits:
            await asyncio.wait({awaited.task}, timeout=self.limits.landing_timeout_s)
        if awaited.landed:
            return awaited.task.result()
        awaited.task.cancel()
        return LandingResult(LandingOutcome.TIMEOUT) if waits else None

    async def wait(
        self, context: RequestContext, manifest: str, chain: bytes, limit_s: float, node: str | None
    ) -> LandingResult:
        """Wait for the prompt's blocks in `chain`; notes and leases them in the context."""
        if self.store is None:
            return LandingResult(LandingOutcome.STORE_AWAY)
        held, upto = context.prompt.stored_for(manifest), len(chain) // HASH_BYTES
        origin, handoff = context.prompt.origin, context.route.handoff
        reused = handoff.reused_tokens if handoff is not None else None
        wanted = WantedBlocks(manifest, chain, upto, held, node, origin=origin, reused=reused)
        landing = await self.store.wait(wanted, limit_s)
        context.route.note_landing(landing.blocks, held.with_landed(landing.node, landing.blocks))
        context.resources.keep(landing.lease)
        return landing

    def _nothing(self, context: RequestContext, cause: str) -> None:
        """Note why no block of a prompt comes after its prefill leg."""
        self.metrics.handoff_missing[cause] += 1
        context.route.note_nothing(str(cause))

    def _missing(self, context: RequestContext, handoff: Handoff, landed_blocks: int) -> int:
        """Tokens of whole blocks that neither landed nor are known to be with the decode engine.

        Also if the prefill engine promised fewer blocks than the prompt has: its own connection to
        the store may be down.
        """
        domain, plan = context.prompt.domain, context.route.plan
        block_tokens = handoff.block_tokens or (domain.block_tokens if domain else 0)
        if handoff.prompt_tokens is None or not context.prompt.hashable:
            return 0
        usable = usable_blocks(handoff.prompt_tokens, block_tokens)
        missing = max(0, usable - landed_blocks) * block_tokens
        return min(missing, plan.missing_tokens) if plan is not None else missing

    def hashes(self, context: RequestContext, handoff: Handoff | None) -> bytes:
        """The chain of the prompt as the hand-off names blocks; empty if its ids are unknown."""
        request, prompt = context.request, context.prompt
        if not prompt.hashable or prompt.domain is None:
            return b""
        domain = _domain_of(handoff, prompt.domain)
        if prompt.hashes is not None and domain is prompt.domain:
            return prompt.hashes
        ids = request.ids
        if ids is None and prompt.tokens is not None:
            ids = prompt.tokens.ids
        if ids is None and handoff is not None:
            ids = handoff.ids
        if ids is None:
            return b""
        hashes = hash_prompt(self.hash_cache, context, ids, domain)
        if prompt.hashes is None:
            prompt.hashes, prompt.domain = hashes, domain
        return hashes


def _domain_of(handoff: Handoff | None, usual: HashDomain) -> HashDomain:
    """What hashes mean at the engine that answered; `usual` itself if that is the same.

    Its answer counts, not what it said when it joined. Engines of one model may differ.
    """
    if handoff is None or not handoff.block_tokens:
        return usual
    root = handoff.root or usual.root
    if handoff.block_tokens == usual.block_tokens and root == usual.root:
        return usual
    return HashDomain(handoff.block_tokens, root)


@dataclass(eq=False, slots=True, kw_only=True)
class PrefillPhase:
    """Brings a prompt's KV to where its decode engine loads it from."""

    policy: Policy  # chooses other engines
    families: Families  # say how long an engine keeps what it hands over
    legs: Legs
    landing_waiter: LandingWaiter
    budget: RecomputeBudget  # bounds what decode engines may compute for want of KV
    limits: ServingLimits

    async def run(self, context: RequestContext, inputs: RouteInputs, plan: Plan) -> None:
        """Prefill the prompt as `plan` says, which names a prefill engine, and await its landing.

        An engine that cannot be reached or is full has computed nothing, so another takes the
        leg. After other failures decode computes, while the budget allows, else another engine.
        After a refusal too: the router's own one token may be what the engine refuses.

        Raises:
            ApiError: 429: the budget does not allow it; or no engine may be asked.
            Refused: an engine refused the request itself, and the budget is spent.
        """
        tried = Tried()
        while plan.prefill is not None:
            tried.append((plan.prefill, plan.prefill.joins))
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
                others: Sequence[Engine] = ()
                if len(tried) < self.limits.max_attempts:
                    others = tried.others(e for e in inputs.prefill if e.identity is not None)
                computes = failed.row.begun or not others
                if computes and context.resources.recompute(self.budget, plan.missing_tokens):
                    return
                if not others:
                    raise self._over_budget() from None
            found = self.policy.plan(replace(inputs, prefill=others, decode=(plan.decode,)))
            if found.prefill is None:
                self.recompute(context, found.missing_tokens)
                return
            tokens = found.computed_tokens
            plan = replace(plan, prefill=found.prefill, computed_tokens=tokens, work_s=0.0)
            context.route.follow(plan)

    def recompute(
        self, context: RequestContext, tokens: int, otherwise: ApiError | Refused | None = None
    ) -> None:
        """Let decode compute `tokens` of the prompt, if the fleet's budget allows.

        Raises:
            ApiError: 429: it does not. Or `otherwise`.
        """
        if tokens <= 0 or context.kv_ready or context.resources.recompute(self.budget, tokens):
            return
        raise otherwise or self._over_budget()

    async def _prefill(self, context: RequestContext, engine: Engine, tokens: int) -> None:
        handoff = await self.legs.prefill(context, engine, tokens)
        if handoff.transfer_params is not None:
            context.resources.pin(handoff.transfer_params, self.families.of(engine).lease_s)
        missing = await self.landing_waiter.land(context, engine, handoff)
        if missing:
            self.recompute(context, missing)

    def _over_budget(self) -> ApiError:
        return ApiError(
            429,
            "The KV of this prompt is not available and the engines have no room to compute it.",
            retry_after_s=self.budget.retry_after_s,
        )
