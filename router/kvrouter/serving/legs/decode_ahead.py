"""When the decode leg is sent: after the landing, or ahead of it.

A leg that was sent ahead lives only while all goes well. A store that is away, a prefill leg that
fails, a landing that does not come: it is withdrawn before anything of it has reached the client,
and the request goes on as if it had never been sent, within the budget for recomputation.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvrouter.engines.engine import Role
from kvrouter.engines.families.base import PendingKv
from kvrouter.http.failure import Failure
from kvrouter.routing.plan import usable_blocks
from kvrouter.serving.legs.leg import LegFailed
from kvrouter_store.identity.chain import HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from kvrouter.serving.legs.landing import LandingWaiter
    from kvrouter.serving.legs.leg import Legs
    from kvrouter.serving.request.context import RequestContext
    from kvrouter.telemetry.metrics import Metrics


class DecodeAhead:
    """Sends decode legs ahead of their landing, where engine and store allow it.

    Args:
        legs: says that an engine was too slow.
        landing_waiter: awaits landings.
        chunk_blocks: blocks that must have landed before the leg goes; 0 sends it at once, None
            sends none ahead.
        answer_s: how long a leg may take to answer: the prefill leg, and the decode leg after the
            landing.
        metrics: counts what became of such legs.
    """

    def __init__(
        self,
        legs: Legs,
        landing_waiter: LandingWaiter,
        chunk_blocks: int | None,
        answer_s: float,
        metrics: Metrics,
    ) -> None:
        self._legs = legs
        self._landing_waiter = landing_waiter
        self._chunk_blocks = chunk_blocks
        self._answer_s = answer_s
        self._metrics = metrics

    def announce(self, context: RequestContext) -> PendingKv | None:
        """What a decode leg sent now can be told to wait for; None where it goes after the landing.

        Only of an engine that needs what the prefill engine makes and that says it waits: any other
        would compute the prompt itself.
        """
        plan, request = context.route.plan, context.request
        if self._chunk_blocks is None or plan is None or plan.prefill is None or request is None:
            return None
        if request.n > 1:
            return None  # each of its samples would wait, holding the others' place
        identity = plan.decode.identity
        if identity is None or not identity.waits or identity.refusal or not identity.manifest:
            return None
        if plan.prefill.manifest != identity.manifest:
            return None
        hashes = self._landing_waiter.known_hashes(context)
        usable = usable_blocks(request.prompt_tokens, identity.block_tokens or 0)
        blocks = min(usable, len(hashes) // HASH_BYTES)
        return (
            PendingKv(blocks, self._answer_s + self._landing_waiter.timeout_s) if blocks else None
        )

    async def serve(
        self,
        context: RequestContext,
        pending: PendingKv,
        prefill: Coroutine[None, None, None],
        decode: Callable[[], Awaitable[None]],
    ) -> bool:
        """Do both legs; whether the client got its answer. Nothing runs on when this returns.

        False: the decode leg must be sent as usual, `prefill` has ended well.

        Raises:
            LegFailed: the decode engine is to blame, and `prefill` has ended well.
            ApiError, Refused: either leg's.
        """
        self._landing_waiter.watch(context, pending)
        first = asyncio.create_task(prefill, name="prefill leg")
        ahead = asyncio.create_task(self._send(context, pending, decode), name="decode leg")
        try:
            await self._decided(context, pending, first, ahead)
            if not ahead.done():
                self._metrics.ahead["withdrawn"] += 1
                await _ended(ahead)
            elif (error := ahead.exception()) is not None:
                self._metrics.ahead["failed"] += 1
                if isinstance(error, LegFailed):
                    await first
                raise error
            else:
                self._metrics.ahead["answered" if ahead.result() else "not sent"] += 1
                if ahead.result():
                    return True
            await first
            return False
        finally:
            await _ended(first, ahead)
            self._landing_waiter.unwatch(context)

    async def _decided(
        self,
        context: RequestContext,
        pending: PendingKv,
        first: asyncio.Task[None],
        ahead: asyncio.Task[bool],
    ) -> None:
        """Wait for the end of `ahead`, or for a reason to withdraw it.

        Raises:
            LegFailed: all has landed, and the engine does not answer.
        """
        watch = context.route.watch
        assert watch is not None
        await asyncio.wait(
            {watch.task, first, ahead},
            timeout=pending.wait_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not ahead.done() and watch.landed and not context.timing.first_s:
            await asyncio.wait({ahead}, timeout=self._answer_s)
            if not ahead.done() and not context.timing.first_s:
                await _ended(ahead)
                raise self._overdue(context)
        if not ahead.done() and context.timing.first_s:
            await asyncio.wait({ahead})

    def _overdue(self, context: RequestContext) -> LegFailed:
        assert context.route.plan is not None
        self._metrics.ahead["failed"] += 1
        message = f"no answer within {self._answer_s:g} s of the landing"
        return self._legs.failed(context.route.plan.decode, Role.DECODE, Failure.TIMEOUT, message)

    async def _send(
        self, context: RequestContext, pending: PendingKv, decode: Callable[[], Awaitable[None]]
    ) -> bool:
        """The decode leg, when its time has come; False where it was not sent."""
        if self._chunk_blocks and not await self._landing_waiter.begins(
            context, pending, self._chunk_blocks
        ):
            return False
        watch = context.route.watch
        if watch is None or (watch.task.done() and not watch.landed):
            return False
        await decode()
        return True


async def _ended(*tasks: asyncio.Task[None] | asyncio.Task[bool]) -> None:
    """Cancel what still runs, and wait until it has let go of all it held."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
