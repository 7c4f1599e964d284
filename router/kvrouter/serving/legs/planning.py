"""Prompts await their turn for a prefill engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from math import ceil
from time import monotonic
from typing import TYPE_CHECKING

from kvrouter.engines.engine import Role
from kvrouter.errors import ApiError
from kvrouter.openai.request import priority
from kvrouter.routing.planner.queue import QueuedPrompt, rest_s

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrouter.admission.tenants import Tenants
    from kvrouter.engines.pool import EnginePool
    from kvrouter.http.client.pool import Deadlines
    from kvrouter.routing.plan import Plan, RouteInputs
    from kvrouter.routing.planner.queue import PrefillQueue
    from kvrouter.serving.request.context import RequestContext
    from kvrouter.serving.request.limits import ServingLimits
    from kvrouter.telemetry.metrics import Metrics

    Bind = Callable[[Plan], object]


@dataclass(eq=False, slots=True, kw_only=True)
class PrefillQueueWait:
    """Lets prompts await their turn in a `PrefillQueue`; all on one event loop.

    The queue is looked at when a prompt comes, when load fell or engines changed, and at the time
    that the queue itself names, or a circuit breaker: one timer.
    """

    queue: PrefillQueue
    pool: EnginePool
    tenants: Tenants
    deadlines: Callable[[], Deadlines]  # a wait takes at most as long as an engine may take
    limits: ServingLimits
    metrics: Metrics
    _timer: asyncio.TimerHandle | None = field(default=None, init=False)
    _soon: asyncio.Handle | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.pool.load_fell = self.changed
        self.pool.on_change(lambda _, __: self.changed())
        self.pool.on_join(lambda _: self.changed())
        self.pool.on_models_change(lambda _: self.changed())

    async def plan(self, context: RequestContext, inputs: RouteInputs, bind: Bind) -> Plan:
        """The plan of a prompt, for which `bind` was called when it was made.

        Cancelling leaves the queue; what `bind` reserved before is its owner's to release.

        Raises:
            ApiError: 429: its KV is predicted to come too late; 503: its turn did not come in time.
        """
        bound: asyncio.Future[Plan] = asyncio.get_running_loop().create_future()

        def take(plan: Plan) -> None:
            if bound.done():  # its client left, and the queue was not told yet
                self.changed()
                return
            bind(plan)
            bound.set_result(plan)

        request, exchange = context.request, context.exchange
        given = priority(request) if "priority" in request.spans else 0
        came_s = self.queue.clock() - (monotonic() - context.timing.started_s)
        prompt = QueuedPrompt(inputs, take, came_s, self.tenants.of(exchange), given)
        wait_s = self._wait_s(context)
        self.queue.submit(prompt)
        try:
            self._look()
            if bound.done():
                return bound.result()
            self._refuse_late(wait_s, prompt.work_s)
            return await self._turn(context, bound)
        finally:
            if self.queue.withdraw(prompt):
                self.changed()

    async def _turn(self, context: RequestContext, bound: asyncio.Future[Plan]) -> Plan:
        since_s, limit_s = monotonic(), self.deadlines().first_byte_s
        counts = self.metrics.of(context.model)
        counts.waiting += 1
        try:
            async with asyncio.timeout(limit_s):
                return await bound
        except TimeoutError:
            message = f"No prefill engine was free for the prompt within {limit_s:g} s."
            retry_s = max(1, ceil(self._wait_s(context)))
            raise ApiError(503, message, retry_after_s=retry_s) from None
        finally:
            counts.waiting -= 1
            context.waited(since_s, "prefill")

    def _wait_s(self, context: RequestContext) -> float:
        """Rough wait of a prompt that comes now."""
        engines = self.pool.engines(Role.PREFILL, context.model)
        now_s = self.queue.clock()
        free_s = min((rest_s(engine, now_s) for engine in engines), default=0.0)
        return free_s + self.queue.wait_s(context.model)

    def _refuse_late(self, wait_s: float, work_s: float) -> None:
        limit_s, predicted_s = self.limits.max_predicted_ttft_s, wait_s + work_s
        if limit_s and predicted_s > limit_s:
            message = f"The first token is predicted in {predicted_s:.1f} s, beyond {limit_s:g} s."
            raise ApiError(429, message, retry_after_s=max(1, ceil(wait_s)))

    def changed(self) -> None:
        """Load fell, or engines changed: look at the queue, once for all that happens now."""
        if self.queue.waiting and self._soon is None:
            self._soon = asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        for handle in (self._timer, self._soon):
            if handle is not None:
                handle.cancel()
        self._timer = self._soon = None
        trial_s = self.pool.next_trial_s  # before the plan: one that begins meanwhile is not missed
        ring_s = self.queue.plan()
        due_s = min((at_s for at_s in (ring_s, trial_s) if at_s is not None), default=None)
        if due_s is not None and self.queue.waiting:
            wait_s = due_s - self.queue.clock()
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._look)
