"""Legs that do not wait for one another: both at once, or decode before the prompt has landed.

`ConcurrentLegs`: engines that find each other once both have their request. Neither may be left
waiting for the other: if one fails before the client has seen anything, the other is withdrawn, and
both are sent again with a new rendezvous.

`DecodeAhead`: its leg goes on only while all goes well. If the store is away, the prefill leg
fails or the landing does not come, it is withdrawn before the client has seen anything of it. The
request then goes on as if the leg had never been sent, within the budget for recomputation.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from kvrouter.engines.engine import Engine, Role
from kvrouter.engines.families.base import PendingKv
from kvrouter.errors import ApiError, bad_request
from kvrouter.http.client.pool import UpstreamError
from kvrouter.http.failure import Failure
from kvrouter.prefix.stores.base import LandingOutcome, WantedBlocks
from kvrouter.routing.plan import Plan, RouteInputs, usable_blocks
from kvrouter.serving.legs import failures
from kvrouter.serving.legs.failures import LegFailed, Refused, Tried, answer_of, note
from kvrouter.serving.request.context import AwaitedLanding
from kvrouter_store.identity.chain import HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from kvrouter.admission.waiting import EngineWait
    from kvrouter.engines.families import Families
    from kvrouter.engines.families.base import Rendezvous
    from kvrouter.engines.pool import EnginePool
    from kvrouter.routing.policies.base import Policy
    from kvrouter.serving.legs.leg import EngineClient, Legs
    from kvrouter.serving.legs.prefill import LandingWaiter, PrefillPhase
    from kvrouter.serving.legs.release import Releases
    from kvrouter.serving.request.context import RequestContext, ResponseSink
    from kvrouter.serving.request.limits import ServingLimits
    from kvrouter.telemetry.metrics import Metrics

    _Left = tuple[RouteInputs, Plan, ApiError | Refused | None]


@dataclass(eq=False, slots=True, kw_only=True)
class ConcurrentLegs:
    """Sends the legs of requests to pairs of engines."""

    pool: EnginePool
    policy: Policy  # chooses the pairs
    families: Families  # say where two engines meet
    legs: Legs
    releases: Releases  # frees what a prefill engine keeps for a decode engine that was not reached
    engine_wait: EngineWait  # where requests wait for engines
    limits: ServingLimits

    async def run(
        self, context: RequestContext, sink: ResponseSink, plan: Plan, inputs: RouteInputs
    ) -> _Left | None:
        """Do both legs, on other engines as long as the client has seen nothing of them.

        Returns:
            None if the client has its answer. Else a plan whose decode engine can do without a
            prefill leg, the inputs that it was made of, and the client's answer if it must not.

        Raises:
            ApiError: no pair of engines can do it.
            Refused: an engine refused the request itself.
        """
        failed, tried = None, Tried()
        self._check(context, plan, inputs)
        for _ in range(self.limits.max_attempts):
            if failed is not None or not _can_run(plan):
                found = await self.engine_wait.until(
                    partial(self._ready, context, inputs, tried), context.model
                )
                if found is None:
                    break
                inputs, plan = found, self.policy.plan(found)
                failures.begin_pair(context, self.pool, plan)
            context.route.follow(plan)
            context.route.note_handoff(None)
            if plan.prefill is None:
                return (inputs, plan, None) if serves_whole(plan.decode) else _no_prefill()
            problem = await self._both(context, sink, plan, plan.prefill)
            if problem is None:
                return None
            if isinstance(problem, Refused):
                return self._alone(inputs, plan, problem, problem.leg)
            failed = problem
            if not note(context, failed) or context.answering:
                break
            tried.append((failed.engine, failed.engine.joins))
        if failed is None:
            return _no_prefill()
        final = not failed.row.again or context.answering
        alone = failed.leg is Role.PREFILL or failures.last_try(context, failed)
        leg = Role.PREFILL if alone and not final else Role.DECODE
        return self._alone(inputs, plan, answer_of(context), leg)

    async def _both(
        self, context: RequestContext, sink: ResponseSink, plan: Plan, prefill: Engine
    ) -> LegFailed | Refused | None:
        """Do both legs of a plan; how they failed, if they did."""
        rendezvous = self._meet(context, plan.decode, prefill)
        first = self.legs.prefill(context, prefill, plan.computed_tokens, rendezvous)
        second = self.legs.decode(context, sink, plan.decode, rendezvous=rendezvous)
        problem: LegFailed | Refused | None = None
        try:
            await both(context, first, second)
        except Refused as refused:
            problem = refused  # nothing was made, or the engine that refused frees it
        except LegFailed as failed:
            problem = failed
            if failed.engine is plan.decode and not failed.taken:
                self.releases.begin(context)
        context.resources.unpin()
        return problem

    def _alone(
        self, inputs: RouteInputs, plan: Plan, problem: ApiError | Refused, leg: Role
    ) -> _Left:
        """A plan without the prefill leg, if that alone has failed; else raises `problem`."""
        if leg is Role.DECODE or not serves_whole(plan.decode):
            raise problem
        inputs = replace(inputs, prefill=(), decode=(plan.decode,))
        return inputs, self.policy.plan(inputs), problem

    def _meet(self, context: RequestContext, decode: Engine, prefill: Engine) -> Rendezvous:
        family = self.families.of(decode)
        rendezvous = family.new_rendezvous(prefill)
        if family.lease_s:  # from now on: a leg that is cut off does not say how far it came
            context.resources.pin(rendezvous.decode["kv_transfer_params"], family.lease_s)
        return rendezvous

    def _ready(
        self, context: RequestContext, inputs: RouteInputs, tried: Tried
    ) -> RouteInputs | None:
        """The engines that can be asked now; None if they cannot do it."""
        prefill = tried.others(self.pool.engines(Role.PREFILL, context.model))
        prefill = failures.other_sources(context, prefill)
        decode = tried.others(self.pool.engines(Role.DECODE, context.model))
        decode = decode if prefill else list(filter(serves_whole, decode))
        return replace(inputs, prefill=prefill, decode=decode) if decode else None

    def _check(self, context: RequestContext, plan: Plan, inputs: RouteInputs) -> None:
        """Check that engines which only decode can do what is asked.

        Raises:
            ApiError: 400: they cannot.
        """
        if not inputs.split and not serves_whole(plan.decode):
            name = self.families.of(plan.decode).unsplittable(context.request)
            raise bad_request(f"Engines that only decode do not support `{name}`.", name)


def serves_whole(engine: Engine) -> bool:
    """Whether it can do without a prefill leg, as far as is known."""
    return engine.identity is None or engine.identity.can_serve_whole


def _can_run(plan: Plan) -> bool:
    """Whether its engines are there, and enough of them."""
    if plan.prefill is None:
        return serves_whole(plan.decode)
    return plan.prefill.identity is not None and plan.decode.identity is not None


def _no_prefill() -> NoReturn:
    raise ApiError(503, "No prefill engine is available.", retry_after_s=1)


async def both(
    context: RequestContext,
    prefill: Coroutine[None, None, object],
    decode: Coroutine[None, None, None],
) -> None:
    """Do both legs; nothing runs on when this returns.

    A prefill leg that fails after the answer has begun does not matter: its KV is with the decode
    engine, or there would be no answer. Unless it says that it gave up: SGLang's decode engines
    then answer from KV that never came (sglang issue 30233). One that has not ended with the answer
    is cancelled.

    Raises:
        LegFailed, Refused: by the leg that ended first.
    """
    first = asyncio.create_task(prefill, name="prefill leg")
    second = asyncio.create_task(decode, name="decode leg")
    try:
        await asyncio.wait((first, second), return_when=asyncio.FIRST_COMPLETED)
        if not second.done():
            problem = first.exception()
            aborted = isinstance(problem, LegFailed) and problem.failure is Failure.ABORTED
            if problem is None or (context.timing.first_s and not aborted):
                await asyncio.wait({second})
        if second.done() and second.exception() is None:
            return
        if first.done():
            first.result()
        if second.done():
            second.result()
    finally:
        await _cancel(first, second)


@dataclass(eq=False, slots=True, kw_only=True)
class DecodeAhead:
    """Sends decode legs ahead of their landing, if engine and store allow it."""

    client: EngineClient  # knows how long an engine may take, and reports one that took longer
    legs: Legs
    prefill_phase: PrefillPhase
    landing_waiter: LandingWaiter
    limits: ServingLimits
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
        hashes = self.landing_waiter.hashes(context, None)
        store, node = self.landing_waiter.store, plan.prefill.node
        if store is None or not store.nodes:
            node = None
        elif node not in store.nodes:
            return None  # nobody knows where it will land
        usable = usable_blocks(request.prompt_tokens, identity.block_tokens or 0)
        blocks = min(usable, len(hashes) // HASH_BYTES)
        wait_s = self.client.deadlines.first_byte_s + self.limits.landing_timeout_s
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
        landing = begin_wait(self.landing_waiter, context, plan.decode.manifest or "", pending)
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
        if self.chunk_blocks and not await first_landed(
            self.landing_waiter, context, landing.manifest, pending, self.chunk_blocks
        ):
            return False
        if landing.task.done() and not landing.landed:
            return False
        await self.legs.decode(context, sink, plan.decode, pending)
        return True


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel what still runs, and wait until it has released all that it held."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def begin_wait(
    waiter: LandingWaiter, context: RequestContext, manifest: str, pending: PendingKv
) -> AwaitedLanding:
    """Await in the background what a decode engine waits for, and lease it.

    `LandingWaiter.land` then awaits the same. The caller must cancel its task; a lease stays the
    context's.
    """
    chain = (context.prompt.hashes or b"")[: pending.blocks * HASH_BYTES]
    manifest = waiter.store.current(manifest) if waiter.store is not None else manifest
    wait = waiter.wait(context, manifest, chain, pending.wait_s, pending.node)
    task = asyncio.create_task(wait, name="landing")
    awaited = AwaitedLanding(manifest, pending.blocks, task, pending.node)
    context.route.note_wait(awaited)
    return awaited


async def first_landed(
    waiter: LandingWaiter, context: RequestContext, manifest: str, pending: PendingKv, blocks: int
) -> bool:
    """Wait for the first `blocks` that the store did not hold; whether they landed."""
    if waiter.store is None:
        return False
    held, node, origin = context.prompt.stored_for(manifest), pending.node, context.prompt.origin
    upto = min(held.at(node) + blocks, pending.blocks)
    hashes, current = context.prompt.hashes or b"", waiter.store.current(manifest)
    wanted = WantedBlocks(current, hashes, upto, held, node, lease=False, origin=origin)
    landing = await waiter.store.wait(wanted, pending.wait_s)
    return landing.outcome is LandingOutcome.LANDED
