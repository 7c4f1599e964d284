"""Decode legs that are sent before the KV of their prompt has landed.

Such a leg goes on only while all goes well. If the store is away, the prefill leg fails or the
landing does not come, it is withdrawn before the client has seen anything of it. The request then
goes on as if the leg had never been sent, within the budget for recomputation.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvrouter.engines.families.base import PendingKv
from kvrouter.http.client.pool import UpstreamError
from kvrouter.http.failure import Failure
from kvrouter.routing.plan import Plan, RouteInputs, usable_blocks
from kvrouter.serving.legs.failures import LegFailed
from kvrouter_store.identity.chain import HASH_BYTES

if TYPE_CHECKING:
    from kvrouter.serving.legs.engine_client import EngineClient
    from kvrouter.serving.legs.landing import LandingWaiter
    from kvrouter.serving.legs.leg import Legs
    from kvrouter.serving.legs.prefill import PrefillPhase
    from kvrouter.serving.request.context import AwaitedLanding, RequestContext, ResponseSink
    from kvrouter.telemetry.metrics import Metrics


@dataclass(eq=False, slots=True, kw_only=True)
class DecodeAhead:
    """Sends decode legs ahead of their landing, if engine and store allow it."""

    client: EngineClient  # knows how long an engine may take, and reports one that took longer
    legs: Legs
    prefill_phase: PrefillPhase
    landing_waiter: LandingWaiter
    chunk_blocks: int  # blocks that must have landed before the leg goes; 0 sends it at once
    metrics: Metrics  # counts how such legs ended

    def announce(self, context: RequestContext, plan: Plan) -> PendingKv | None:
        """What a decode engine can wait for if its leg is sent now; None: send it after landing.

        Only an engine that needs what the prefill engine makes, and that can wait: any other would
        compute the prompt itself.
        """
        identity, request = plan.decode.identity, context.request
        if request.n > 1:
            return None  # each of its samples would wait, in the place of another request
        if identity is None or not identity.waits or identity.refusal or not identity.manifest:
            return None
        if plan.prefill is None or plan.prefill.manifest != identity.manifest:
            return None
        if identity.domain != context.prompt.domain:
            return None  # the prompt's hashes are not the names of its blocks
        hashes = self.landing_waiter.known_hashes(context)
        store, node = self.landing_waiter.store, plan.prefill.node
        if store is None or not store.nodes:
            node = None
        elif node not in store.nodes:
            return None  # nobody knows where it will land
        usable = usable_blocks(request.prompt_tokens, identity.block_tokens or 0)
        blocks = min(usable, len(hashes) // HASH_BYTES)
        wait_s = self.client.deadlines.first_byte_s + self.landing_waiter.timeout_s
        return PendingKv(blocks, wait_s, node) if blocks else None

    async def run(
        self,
        context: RequestContext,
        sink: ResponseSink,
        plan: Plan,
        inputs: RouteInputs,
        pending: PendingKv,
    ) -> bool:
        """Do both legs; whether the client got its answer. Nothing runs on when this returns.

        False: the prefill leg has ended well, and the decode leg must be sent as usual.

        Raises:
            LegFailed: the decode engine is to blame, and the prefill leg has ended well.
            ApiError, Refused: either leg's.
        """
        landing = self.landing_waiter.begin_wait(context, plan.decode.manifest or "", pending)
        prefill = asyncio.create_task(
            self.prefill_phase.run(context, inputs, plan), name="prefill leg"
        )
        decode = asyncio.create_task(
            self._send(context, sink, plan, landing, pending), name="decode leg"
        )
        try:
            await self._decided(context, plan, pending, landing, prefill, decode)
            if not decode.done():
                self.metrics.ahead["withdrawn"] += 1
                await _cancel(decode)
            elif (error := decode.exception()) is not None:
                self.metrics.ahead["failed"] += 1
                if isinstance(error, LegFailed):
                    await prefill
                raise error
            else:
                self.metrics.ahead["answered" if decode.result() else "not sent"] += 1
                if decode.result():
                    return True
            await prefill
            return False
        finally:
            landing.task.cancel()  # first: a second cancellation may end the next wait
            await _cancel(prefill, decode)

    async def _decided(  # noqa: PLR0917
        self,
        context: RequestContext,
        plan: Plan,
        pending: PendingKv,
        landing: AwaitedLanding,
        prefill: asyncio.Task[None],
        decode: asyncio.Task[bool],
    ) -> None:
        """Wait for the end of `decode`, or for a reason to withdraw it.

        Raises:
            LegFailed: all has landed, and the engine does not answer.
        """
        await asyncio.wait(
            {landing.task, prefill, decode},
            timeout=pending.wait_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not decode.done() and landing.landed and not context.timing.first_s:
            answer_s = self.client.deadlines.first_byte_s
            await asyncio.wait({decode}, timeout=answer_s)
            if not decode.done() and not context.timing.first_s:
                await _cancel(decode)
                self.metrics.ahead["failed"] += 1
                message = f"no answer within {answer_s:g} s of the landing"
                raise self.client.failed(plan.decode, UpstreamError(Failure.TIMEOUT, message))
        if not decode.done() and context.timing.first_s:
            await asyncio.wait({decode})

    async def _send(
        self,
        context: RequestContext,
        sink: ResponseSink,
        plan: Plan,
        landing: AwaitedLanding,
        pending: PendingKv,
    ) -> bool:
        """Send the decode leg when its time has come; False: it was not sent."""
        if self.chunk_blocks and not await self.landing_waiter.first_landed(
            context, landing.manifest, pending, self.chunk_blocks
        ):
            return False
        if landing.task.done() and not landing.landed:
            return False
        await self.legs.decode(context, sink, plan.decode, pending)
        return True


async def _cancel(*tasks: asyncio.Task[None] | asyncio.Task[bool]) -> None:
    """Cancel what still runs, and wait until it has released all that it held."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
