"""Frees what prefill engines hold for decode legs that will not come.

A hand-off that nobody fetches stays in the prefill engine's memory until its lease ends. A decode
engine that is told of it, in a request that it refuses, has it freed at once.
"""

from __future__ import annotations

import asyncio
import logging
from time import monotonic
from typing import TYPE_CHECKING, Final

from kvrouter.engines.engine import Role
from kvrouter.serving.request.context import Pinned

if TYPE_CHECKING:
    from kvrouter.engines.engine import Engine
    from kvrouter.engines.families import Families
    from kvrouter.engines.pool import EnginePool
    from kvrouter.serving.legs.leg import Legs
    from kvrouter.serving.request.context import RequestContext
    from kvrouter.telemetry.metrics import Metrics

MARGIN_S: Final = 5.0
"""Before the end of a lease: what is older may be gone, or a decode engine has it."""
MAX_ASKED: Final = 3
_REFUSED: Final = 400

log = logging.getLogger(__name__)


class Releases:
    """Sends releases, each in a task of its own, for the request's is over. `close` ends them.

    Args:
        pool: knows the decode engines.
        families: spell the release.
        legs: asks them, each within a few seconds.
        metrics: counts what became of them.
    """

    def __init__(self, pool: EnginePool, families: Families, legs: Legs, metrics: Metrics) -> None:
        self._pool = pool
        self._families = families
        self._legs = legs
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, context: RequestContext, model: str) -> None:
        """Have freed what is kept for `context`, if it still is. Does not wait."""
        pinned, context.held.pinned = context.held.pinned, None
        if pinned is None or context.route.plan is None or monotonic() >= pinned.until_s:
            return
        releasing = self._release(context, model, context.route.plan.decode, pinned.params)
        task = asyncio.create_task(releasing, name="release")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Give up what is under way. Idempotent."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _release(
        self, context: RequestContext, model: str, first: Engine, params: bytes
    ) -> None:
        body = self._families.of(first).release_body(model, params)
        if body is not None and await self._told(context, self._able(first, model), body):
            self._metrics.releases["released"] += 1
            return
        self._metrics.releases["stranded"] += 1
        log.warning(
            "request %s: KV stays on %s until its lease ends, for no decode engine could be told "
            "that nobody fetches it",
            context.request_id,
            context.route.prefill_engine,
        )

    async def _told(self, context: RequestContext, able: list[Engine], body: bytes) -> bool:
        """Whether one of the engines was told."""
        for engine in able[:MAX_ASKED]:
            try:
                status = await self._legs.status(engine, "/v1/completions", context.fields, body)
            except OSError as error:
                log.debug("release on %s: %s", engine.address, error)
                continue
            if status == _REFUSED:
                return True
        return False

    def _able(self, first: Engine, model: str) -> list[Engine]:
        """Decode engines of the same family, the one that was meant to have it first."""
        able = [e for e in self._pool.engines(Role.DECODE, model) if e.family == first.family]
        return sorted(able, key=lambda engine: engine is not first)


def pinned(params: bytes, lease_s: float) -> Pinned:
    """What is kept from now on, until shortly before its lease ends."""
    return Pinned(params, monotonic() + lease_s - MARGIN_S)


def spent(context: RequestContext, engine: Engine) -> bool:
    """Whether a hand-off cannot be fetched any more, or not by `engine`."""
    plan, pinned_ = context.route.plan, context.held.pinned
    if plan is not None and engine.family != plan.decode.family:
        return True
    return pinned_ is None or monotonic() > pinned_.until_s
