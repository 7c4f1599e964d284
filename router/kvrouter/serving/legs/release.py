"""Frees the KV that prefill engines keep for decode legs that will not come.

A hand-off that no engine fetches stays in the prefill engine's memory until its lease ends. A
decode engine that gets it in a request that it refuses has it freed at once.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Final

from kvrouter.engines.engine import Engine, Role
from kvrouter.openai.endpoints import COMPLETIONS
from kvrouter.serving.legs.calls import call

if TYPE_CHECKING:
    from kvrouter.engines.families import Families
    from kvrouter.engines.pool import EnginePool
    from kvrouter.serving.legs.leg import EngineClient
    from kvrouter.serving.request.context import RequestContext
    from kvrouter.telemetry.metrics import Metrics

MAX_ASKED: Final = 3
_REFUSED: Final = 400

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True, kw_only=True)
class Releases:
    """Sends releases, each in its own task, because the request's task ends. `close` ends them."""

    pool: EnginePool  # knows the decode engines
    families: Families  # spell the release
    client: EngineClient  # asks engines, each within a few seconds
    metrics: Metrics  # counts releases by how they ended
    _tasks: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    def begin(self, context: RequestContext) -> None:
        """Have freed what is kept for `context`, if it still is. Does not wait."""
        pinned = context.resources.unpin()
        if pinned is None or context.route.plan is None or monotonic() >= pinned.until_s:
            return
        releasing = self._release(context, context.route.plan.decode, pinned.params)
        task = asyncio.create_task(releasing, name="release")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel the releases that run. Idempotent."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _release(self, context: RequestContext, first: Engine, params: bytes) -> None:
        body = self.families.of(first).release_body(context.model, params)
        if body is not None and await self._refused_by_one(context, first, body):
            self.metrics.releases["released"] += 1
            return
        self.metrics.releases["stranded"] += 1
        log.warning(
            "request %s: %s keeps KV until its lease ends, because no decode engine could free it",
            context.request_id,
            context.route.prefill_engine,
        )

    async def _refused_by_one(self, context: RequestContext, first: Engine, body: bytes) -> bool:
        """Send the release to decode engines of the same family; whether one took it.

        The engine that should have got the KV comes first.
        """
        able = [
            engine
            for engine in self.pool.engines(Role.DECODE, context.model)
            if engine.family == first.family
        ]
        for engine in sorted(able, key=lambda engine: engine is not first)[:MAX_ASKED]:
            try:
                status, _ = await call(self.client, engine, COMPLETIONS, body, context.fields)
            except OSError as error:
                log.debug("release on %s: %s", engine.address, error)
                continue
            if status == _REFUSED:
                return True
        return False


def spent(context: RequestContext, engine: Engine) -> bool:
    """Whether a hand-off cannot be fetched any more, or not by `engine`."""
    plan, pinned = context.route.plan, context.resources.pinned
    if plan is not None and engine.family != plan.decode.family:
        return True
    return pinned is None or monotonic() > pinned.until_s
