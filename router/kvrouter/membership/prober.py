"""Health checks and identification of engines: one task per engine, which updates the pool."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, replace
from time import monotonic
from typing import TYPE_CHECKING, Final

from kvrouter.engines.families.pages import ProbeFailed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvrouter.engines.engine import Engine, Identity
    from kvrouter.engines.life import Lives
    from kvrouter.engines.pool import EnginePool
    from kvrouter.membership.detect import EngineDetector
    from kvrouter.membership.probe_client import ProbeClient

START_S: Final = 0.002
"""Between the beginnings of two checks, which cost half a millisecond each: thousands of engines
that were added at once would keep the event loop, and are checked less often."""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Prober:
    """Watches engines: those that are well join the pool, those that say they are not leave it.

    Who does not answer may only be busy: that is noted in `lives`.
    """

    pool: EnginePool  # of the engines
    client: ProbeClient  # of `detector`; the prober closes it
    detector: EngineDetector  # identifies engines and checks their health
    interval_s: float  # between two health checks of one engine; may change
    lives: Lives  # of the engines
    # Takes the identity of an engine before it joins, and completes it.
    joins: Callable[[Identity], Awaitable[Identity]] | None = None

    def __post_init__(self) -> None:
        self._tasks: dict[Engine, asyncio.Task[None]] = {}
        self._probed: dict[Engine, asyncio.Event] = {}
        self._problems: dict[Engine, str] = {}
        self._next_start_s = 0.0

    async def probed(self) -> None:
        """Return when each watched engine was probed once, or after the client's `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.client.timeout_s):
                await asyncio.gather(*(probed.wait() for probed in self._probed.values()))

    def watch(self, engine: Engine) -> None:
        """Watch one more engine from now on."""
        probed = self._probed[engine] = asyncio.Event()
        watching = self._watch(engine, probed)
        self._tasks[engine] = asyncio.create_task(watching, name=f"probe {engine.address}")

    def forget(self, engine: Engine) -> None:
        """Watch `engine` no longer."""
        self._problems.pop(engine, None)
        self.lives.forget(engine)
        probed = self._probed.pop(engine, None)
        if probed is not None:
            probed.set()
        task = self._tasks.pop(engine, None)
        if task is not None:
            task.cancel()

    def problem(self, engine: Engine) -> str | None:
        """What was wrong with `engine` at its last probe, and why it is away; None: nothing."""
        why = engine.left_why if engine.identity is None else ""
        return "; now: ".join(filter(None, (why, self._problems.get(engine)))) or None

    async def close(self) -> None:
        """Stop watching and close connections. Idempotent."""
        tasks, self._tasks = self._tasks, {}
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        await self.client.close()

    async def check(self, engine: Engine) -> str | None:
        """Check its health, then identify it or refresh its models; what is wrong, or None.

        That the router has no descriptor left is not wrong with an engine.
        """
        pulse = self.lives.pulse(engine)
        try:
            await self.detector.check_health(engine)
            if engine.identity is None:
                await self._identify(engine)
            else:
                await self._refresh_models(engine)
        except ProbeFailed as error:
            if error.ours and engine.identity is not None:
                log.warning("engine %s could not be checked: %s", engine.address, error)
                return None
            if error.silent:
                pulse.missed += 1
            elif error.status:
                pulse.answered()
            return str(error)
        pulse.answered()
        return None

    async def _identify(self, engine: Engine) -> None:
        if engine.left_for == "stalled":
            await self.detector.try_core(engine)
            log.info("engine %s, which had stalled, computes again", engine.address)
        identity = await self.detector.identify(engine)
        if self.joins is not None:
            identity = await self.joins(identity)
        log.info("engine %s joins as %s: %s", engine.address, engine.role, identity)
        self.pool.join(engine, identity)
        if identity.events_refused is not None:
            text = "KV events of %s are not all taken: %s"
            log.warning(text, engine.address, identity.events_refused)

    async def _refresh_models(self, engine: Engine) -> None:
        """Find out which adapters the engine has loaded and unloaded."""
        served = await self.detector.served(engine)
        known = engine.identity
        if known is None:
            return  # it left meanwhile
        identity = replace(
            known,
            models=served.models,
            adapters=served.adapters,
            max_model_len=served.max_model_len,
        )
        if identity != known:
            log.info("engine %s now serves %s", engine.address, ", ".join(identity.models))
            self.pool.update_models(engine, identity)

    async def _turn(self) -> None:
        """Return when the next check may begin."""
        now_s = asyncio.get_running_loop().time()
        start_s = max(now_s, self._next_start_s)
        self._next_start_s = start_s + START_S
        await asyncio.sleep(start_s - now_s)

    async def _watch(self, engine: Engine, probed: asyncio.Event) -> None:
        refusals, logged, pulse = 0, "", self.lives.pulse(engine)
        while True:
            await self._turn()
            missed, began_s = pulse.missed, monotonic()
            try:
                problem = await self.check(engine)
            except Exception as error:  # an unexpected answer must not end the watch
                log.exception("probe of %s", engine.address)
                problem = repr(error)
            probed.set()
            if problem is None:
                self._problems.pop(engine, None)
                refusals, logged = 0, ""
                await asyncio.sleep(self.interval_s)
                continue
            silent = pulse.missed > missed
            refusals += not silent
            self._problems[engine] = problem
            leaves = not silent and refusals >= self.lives.limits.failed_checks
            if (engine.identity is None or leaves) and (
                self.pool.leave(engine, "check") or problem != logged
            ):
                log.warning("engine %s is not available: %s", engine.address, problem)
                logged = problem
            waited_s = monotonic() - began_s if silent else 0.0
            await asyncio.sleep(max(0.0, self.interval_s - waited_s))
