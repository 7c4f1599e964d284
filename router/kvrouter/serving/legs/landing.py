"""From the prefill leg's answer to its KV in the store: whether decode can load what it needs."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING

from kvrouter.engines.engine import HashDomain
from kvrouter.prefix.store_view import LandingOutcome, LandingResult
from kvrouter.routing.plan import usable_blocks
from kvrouter.serving.legs.inputs import hash_prompt
from kvrouter.serving.request.context import AwaitedLanding
from kvrouter_store.identity.chain import HASH_BYTES

if TYPE_CHECKING:
    from kvrouter.engines.engine import Engine
    from kvrouter.engines.families.base import Handoff, PendingKv
    from kvrouter.prefix.hash_cache import HashCache
    from kvrouter.prefix.store_view import StoreView
    from kvrouter.serving.request.context import RequestContext
    from kvrouter.telemetry.metrics import Metrics


class LandingWaiter:
    """Awaits landings.

    Args:
        store: the store, or None where engines hand over among themselves.
        chains: hashes prompts.
        timeout_s: how long after the prefill leg's answer a landing is awaited; may change.
        metrics: counts and times landings.
    """

    def __init__(
        self, store: StoreView | None, chains: HashCache, timeout_s: float, metrics: Metrics
    ) -> None:
        self._store = store
        self._chains = chains
        self.timeout_s = timeout_s
        self._metrics = metrics

    async def land(self, context: RequestContext, prefill: Engine) -> int:
        """Wait for the KV that the hand-off of `context` promises, and lease it.

        Args:
            context: the request.
            prefill: the engine that made the hand-off.

        Returns:
            tokens that decode will have to compute after all; 0 where all has landed, or where
            the hand-off promises nothing that could be awaited.
        """
        handoff = context.route.handoff
        if handoff is not None and handoff.missing:
            self._metrics.handoff_missing[()] += 1
            return context.route.plan.missing_tokens if context.route.plan is not None else 0
        if self._store is None or handoff is None or context.timing.first_s:
            return 0
        if handoff.manifest is None:
            if handoff.transfer_params is None and prefill.manifest is not None:
                self._metrics.handoff_missing[()] += 1
            return 0
        hashes = self._hashes(context, handoff)
        upto = min(handoff.blocks, len(hashes) // HASH_BYTES)
        if not upto:
            return self._missing(context, handoff, 0)
        begun_s = monotonic()
        landing = await self._watched(context, handoff, upto)
        if landing is None:
            wait = self._wait(context, handoff.manifest, upto, self.timeout_s)
            landing = await wait
        context.landed(begun_s, landing)
        self._metrics.handoff.observe(context.timing.landed_s - begun_s)
        self._metrics.landings[landing.outcome.value] += 1
        return self._missing(context, handoff, context.route.landed_blocks or 0)

    def loadable_anywhere(self, context: RequestContext) -> bool:
        """Whether any decode engine of the manifest can load the prompt's KV as well as another.

        So it is once all that was awaited is in the store and leased. Without a store of the
        router's own it is believed; what was handed over belongs to one decode engine.
        """
        handoff = context.route.handoff
        if handoff is None or handoff.missing or handoff.transfer_params is not None:
            return False
        if context.held.grant is not None:
            return False
        return self._store is None or context.held.lease is not None

    def known_hashes(self, context: RequestContext) -> bytes:
        """The chain of the prompt before any leg has answered; empty where its ids are unknown."""
        return self._hashes(context, None)

    def watch(self, context: RequestContext, pending: PendingKv) -> None:
        """Await in the background what a decode leg was told is coming, and lease it.

        `land` then awaits the same; `unwatch` must end it.
        """
        assert context.route.plan is not None
        manifest = context.route.plan.decode.manifest or ""
        wait = self._wait(context, manifest, pending.blocks, pending.wait_s)
        task = asyncio.create_task(wait, name="landing")
        context.route.watch = AwaitedLanding(manifest, pending.blocks, task)

    def unwatch(self, context: RequestContext) -> None:
        """Give up what `watch` began, if it has not ended; a lease stays the context's."""
        if context.route.watch is not None:
            context.route.watch.task.cancel()

    async def begins(self, context: RequestContext, pending: PendingKv, blocks: int) -> bool:
        """Wait for the first `blocks` that the store did not hold; whether they landed."""
        assert self._store is not None
        assert context.route.plan is not None
        manifest, hashes = context.route.plan.decode.manifest or "", context.prompt.hashes or b""
        held = context.prompt.stored.get(manifest, 0) if context.prompt.stored else 0
        first, upto = max(0, held - 1), min(held + blocks, pending.blocks)
        chain = hashes[first * HASH_BYTES : upto * HASH_BYTES]
        landing = await self._store.wait(
            manifest, chain, max(0, upto - first), pending.wait_s, lease=False
        )
        return landing.outcome is LandingOutcome.LANDED

    async def _watched(
        self, context: RequestContext, handoff: Handoff, upto: int
    ) -> LandingResult | None:
        """What is awaited already, if it is what the hand-off promises; else that is given up."""
        watch = context.route.watch
        if watch is None or watch.landed:
            return watch.task.result() if watch is not None else None
        if watch.manifest == handoff.manifest and upto >= watch.blocks and not watch.task.done():
            await asyncio.wait({watch.task}, timeout=self.timeout_s)
            if watch.landed:
                return watch.task.result()
            watch.task.cancel()
            return LandingResult(LandingOutcome.TIMEOUT)
        watch.task.cancel()
        return None

    async def _wait(
        self, context: RequestContext, manifest: str, upto: int, timeout_s: float
    ) -> LandingResult:
        """Wait for the first `upto` blocks of the prompt; fills what the context knows and holds.

        The last block that was there already stands for all before it, which are not sent again:
        no block goes from the store before those that follow it.
        """
        assert self._store is not None
        hashes = context.prompt.hashes or b""
        held = context.prompt.stored.get(manifest, 0) if context.prompt.stored else 0
        first = max(0, min(held, upto) - 1)
        chain = hashes[first * HASH_BYTES : upto * HASH_BYTES]
        landing = await self._store.wait(manifest, chain, upto - first, timeout_s)
        context.route.landed_blocks = first + landing.blocks if landing.blocks else 0
        if landing.outcome is LandingOutcome.LANDED:
            context.route.landed_blocks = upto
        if context.timing.first_s and landing.lease is not None:
            landing.lease.release()  # the prompt is in the engine already
        else:
            context.held.lease = landing.lease
        return landing

    def _missing(self, context: RequestContext, handoff: Handoff, landed_blocks: int) -> int:
        """Tokens of whole blocks that neither landed nor are known to be with the decode engine.

        Also where the prefill engine promised fewer blocks than the prompt has: its own way to the
        store may be cut.
        """
        domain, plan = context.prompt.domain, context.route.plan
        block_tokens = handoff.block_tokens or (domain.block_tokens if domain else 0)
        if handoff.prompt_tokens is None or not context.prompt.hashable:
            return 0
        usable = usable_blocks(handoff.prompt_tokens, block_tokens)
        missing = max(0, usable - landed_blocks) * block_tokens
        return min(missing, plan.missing_tokens) if plan is not None else missing

    def _hashes(self, context: RequestContext, handoff: Handoff | None) -> bytes:
        """The chain of the prompt, from what is known or from the ids that the engine answered."""
        if context.prompt.hashes is not None:
            return context.prompt.hashes
        request = context.request
        if request is None or not context.prompt.hashable or context.prompt.domain is None:
            return b""
        told = None
        if handoff is not None and handoff.block_tokens:
            told = HashDomain(handoff.block_tokens, handoff.root or context.prompt.domain.root)
        if request.ids is not None:
            context.prompt.hashes = hash_prompt(self._chains, context, request.ids, told)
        elif context.prompt.tokens is not None:
            context.prompt.hashes = hash_prompt(
                self._chains, context, context.prompt.tokens.ids, told
            )
        elif handoff is not None and handoff.ids is not None:
            context.prompt.hashes = hash_prompt(self._chains, context, handoff.ids, told)
        return context.prompt.hashes or b""
