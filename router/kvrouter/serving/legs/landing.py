"""From the prefill leg's answer to its KV in the store: whether decode can load what it needs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

from kvrouter.engines.engine import Engine, HashDomain
from kvrouter.engines.families.base import NothingLanded
from kvrouter.prefix.stores.base import LandingOutcome, LandingResult, WantedBlocks
from kvrouter.routing.plan import usable_blocks
from kvrouter.serving.legs.inputs import hash_prompt
from kvrouter.serving.request.context import AwaitedLanding, RequestContext
from kvrouter_store.identity.chain import HASH_BYTES

if TYPE_CHECKING:
    from kvrouter.engines.families.base import Handoff, PendingKv
    from kvrouter.prefix.hash_cache import HashCache
    from kvrouter.prefix.stores.base import StoreView
    from kvrouter.telemetry.metrics import Metrics


@dataclass(eq=False, slots=True, kw_only=True)
class LandingWaiter:
    """Awaits landings."""

    store: StoreView | None  # the store; None: engines hand KV over among themselves
    hash_cache: HashCache
    timeout_s: float  # how long after the prefill leg's answer a landing is awaited; may change
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
        hashes = self._hashes(context, handoff)
        upto = min(blocks, len(hashes) // HASH_BYTES)
        if not upto:
            self._nothing(context, handoff.none_promised(blocks))
            return self._missing(context, handoff, 0) if handoff.manifest is not None else 0
        begun_s, node = monotonic(), handoff.node or prefill.node
        landing = await self._awaited(context, manifest, upto, node)
        if landing is None:
            chain = hashes[: upto * HASH_BYTES]
            landing = await self._wait(context, manifest, chain, self.timeout_s, node)
        context.landed(begun_s, landing)
        self.metrics.handoff.observe(context.timing.landed_s - begun_s)
        self.metrics.landings[landing.outcome.value] += 1
        if not landing.blocks:
            late = landing.outcome is LandingOutcome.TIMEOUT
            gone = late and context.prompt.held(manifest).at(node)
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
        if context.held.grant_tokens is not None:
            return False
        return self.store is None or context.held.leased

    def known_hashes(self, context: RequestContext) -> bytes:
        """The chain of the prompt before any leg has answered; empty if its ids are unknown."""
        return self._hashes(context, None)

    def begin_wait(
        self, context: RequestContext, manifest: str, pending: PendingKv
    ) -> AwaitedLanding:
        """Await in the background what a decode engine waits for, and lease it.

        `land` then awaits the same. The caller must cancel its task; a lease stays the context's.
        """
        chain = (context.prompt.hashes or b"")[: pending.blocks * HASH_BYTES]
        manifest = self.store.current(manifest) if self.store is not None else manifest
        wait = self._wait(context, manifest, chain, pending.wait_s, pending.node)
        task = asyncio.create_task(wait, name="landing")
        context.route.awaited = AwaitedLanding(manifest, pending.blocks, task, pending.node)
        return context.route.awaited

    async def first_landed(
        self, context: RequestContext, manifest: str, pending: PendingKv, blocks: int
    ) -> bool:
        """Wait for the first `blocks` that the store did not hold; whether they landed."""
        if self.store is None:
            return False
        held, node, origin = context.prompt.held(manifest), pending.node, context.prompt.origin
        upto = min(held.at(node) + blocks, pending.blocks)
        hashes = context.prompt.hashes or b""
        current = self.store.current(manifest)
        wanted = WantedBlocks(current, hashes, upto, held, node, lease=False, origin=origin)
        landing = await self.store.wait(wanted, pending.wait_s)
        return landing.outcome is LandingOutcome.LANDED

    async def _awaited(
        self, context: RequestContext, manifest: str, upto: int, node: str | None
    ) -> LandingResult | None:
        """The result of `begin_wait`, if the hand-off promises the same; else that is cancelled."""
        awaited = context.route.awaited
        if awaited is None:
            return None
        same = awaited.manifest == manifest and awaited.node in {None, node}
        waits = same and upto >= awaited.blocks and not awaited.task.done()
        if waits:
            await asyncio.wait({awaited.task}, timeout=self.timeout_s)
        if awaited.landed:
            return awaited.task.result()
        awaited.task.cancel()
        return LandingResult(LandingOutcome.TIMEOUT) if waits else None

    async def _wait(
        self, context: RequestContext, manifest: str, chain: bytes, limit_s: float, node: str | None
    ) -> LandingResult:
        """Wait for the prompt's blocks in `chain`; notes and leases them in the context."""
        if self.store is None:
            return LandingResult(LandingOutcome.STORE_AWAY)
        held, upto = context.prompt.held(manifest), len(chain) // HASH_BYTES
        origin, handoff = context.prompt.origin, context.route.handoff
        reused = handoff.reused_tokens if handoff is not None else None
        wanted = WantedBlocks(manifest, chain, upto, held, node, origin=origin, reused=reused)
        landing = await self.store.wait(wanted, limit_s)
        context.route.landed_blocks = landing.blocks
        context.route.landed = held.landed(landing.node, landing.blocks)
        context.held.keep(landing.lease)
        return landing

    def _nothing(self, context: RequestContext, cause: str) -> None:
        """Note why no block of a prompt comes after its prefill leg."""
        self.metrics.handoff_missing[cause] += 1
        context.route.nothing_landed = str(cause)

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

    def _hashes(self, context: RequestContext, handoff: Handoff | None) -> bytes:
        """The chain of the prompt as the hand-off names blocks, if its ids are known."""
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
