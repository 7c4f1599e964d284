"""A prompt that waits is looked at again when an engine may be tried again."""

import asyncio
from unittest.mock import Mock

from kvrouter.engines.engine import Identity, Role
from kvrouter.engines.pool import EnginePool
from kvrouter.http.failure import Failure
from kvrouter.routing.plan import Plan, RouteInputs
from kvrouter.routing.planner.queue import PrefillQueue, QueuedPrompt
from kvrouter.routing.policies.planner import Planner
from kvrouter.serving.legs.planning import PrefillQueueWait

IDENTITY = Identity(("m",), block_tokens=16, manifest="x")
LONG = 120_000


class SlowQueue(PrefillQueue):
    """Its plans take a second each, on a clock that stands otherwise."""

    now_s = 100.0

    def plan(self) -> float | None:
        ring_s = super().plan()
        self.now_s += 1.0
        return ring_s


async def test_a_breaker_that_lets_a_trial_pass_during_a_plan_is_seen() -> None:
    pool = EnginePool(lambda: queue.now_s)
    queue = SlowQueue(pool.engines, Planner(), stall_weight=None, clock=lambda: queue.now_s)
    pool.breaker_limits.threshold, pool.breaker_limits.cooldown_s = 1, 0.5
    roles = Role.PREFILL, Role.PREFILL, Role.DECODE
    busy, failed, _ = engines = [pool.add(f"e:{port}", role) for port, role in enumerate(roles)]
    for engine in engines:
        pool.join(engine, IDENTITY)
    leg = pool.reserve(busy, LONG, prefill=True, work_s=60.0)
    queued = PrefillQueueWait(
        queue=queue, pool=pool, tenants=Mock(), deadlines=Mock(), limits=Mock(), metrics=Mock()
    )
    bound: asyncio.Future[Plan] = asyncio.get_running_loop().create_future()
    inputs = RouteInputs(
        prompt_tokens=5000,
        decode=pool.engines(Role.DECODE, "m"),
        prefill=pool.engines(Role.PREFILL, "m"),
        exact=True,
        block_tokens=16,
        model="m",
        prefill_threshold=0,
    )
    pool.failed(failed, Failure.STATUS)
    queue.submit(QueuedPrompt(inputs, bound.set_result, queue.now_s))
    queued.changed()
    async with asyncio.timeout(5):
        assert (await bound).prefill is failed
    leg.release()
