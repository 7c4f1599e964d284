"""Health checks and introductions of engines: who is there, what it serves, which KV it needs.

One task per engine; it tells the pool, and never touches requests of clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kvrouter.membership.detect import AUTO, MODELS_PATH, EngineDetector, ProbeFailed
from kvrouter.membership.probe_client import ProbeClient

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from kvrouter.credentials.engine_keys import WorkerKeys
    from kvrouter.credentials.tls import Trust
    from kvrouter.engines.engine import Engine
    from kvrouter.engines.families.base import Family
    from kvrouter.engines.pool import EnginePool

INTRODUCTION_S: Final = 60.0
"""Time for the request of one token: it waits its turn among the engine's other requests."""
FAILED_CHECKS: Final = 2
"""Failed health checks in a row after which an engine leaves the pool."""

log = logging.getLogger(__name__)


class Prober:
    """Keeps the pool true to the engines.

    Args:
        pool: is told of joins and leaves.
        family: the dialect of an engine, by the name in `Engine.family`.
        connector: the family that all engines are of, or "auto": each is asked.
        interval_s: between two health checks of one engine; may change.
        timeout_s: that an engine may take for one answer; may change.
        model: the one model to serve, or None for whatever engines serve.
        bootstrap_ports: see `EngineDetector`.
        rank_counts: see `EngineDetector`.
        try_priority: see `EngineDetector`.
        worker_keys: what engines are shown; None: nothing.
        trust: whom to trust that is reached by HTTPS; None: those that this machine does.
        learn: is awaited with the manifest of an engine before it joins, so that those who watch
            the pool can compare it.
    """

    def __init__(
        self,
        pool: EnginePool,
        family: Callable[[str], Family],
        *,
        connector: str = "store",
        interval_s: float = 2.0,
        timeout_s: float = 5.0,
        model: str | None = None,
        bootstrap_ports: Mapping[str, int] | None = None,
        rank_counts: Mapping[str, int] | None = None,
        try_priority: bool = False,
        worker_keys: WorkerKeys | None = None,
        trust: Trust | None = None,
        learn: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self._pool = pool
        self._family = family
        self.interval_s = interval_s
        self.timeout_s = timeout_s
        self._introducer = EngineDetector(
            family,
            self._get,
            self._post,
            connector=connector,
            model=model,
            bootstrap_ports=bootstrap_ports,
            rank_counts=rank_counts,
            try_priority=try_priority,
        )
        self._health_path = family(connector).health_path if connector != AUTO else None
        self._learn = learn
        self._asker = ProbeClient(worker_keys, trust)
        self._tasks: dict[Engine, asyncio.Task[None]] = {}
        self._asked: dict[Engine, asyncio.Event] = {}
        self._problems: dict[Engine, str] = {}

    async def start(self, engines: Iterable[Engine]) -> None:
        """Begin to watch `engines`; returns when each was asked once, or after `timeout_s`."""
        self.begin(engines)
        await self.asked()

    def begin(self, engines: Iterable[Engine]) -> None:
        """Watch `engines`, and others from now on."""
        for engine in engines:
            self.watch(engine)

    async def asked(self) -> None:
        """Return when each engine that is watched was asked once, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.timeout_s):
                await asyncio.gather(*(asked.wait() for asked in self._asked.values()))

    def watch(self, engine: Engine) -> None:
        """Watch one more engine from now on."""
        asked = self._asked[engine] = asyncio.Event()
        watching = self._watch(engine, asked)
        self._tasks[engine] = asyncio.create_task(watching, name=f"probe {engine.address}")

    def forget(self, engine: Engine) -> None:
        """Watch `engine` no longer."""
        self._problems.pop(engine, None)
        asked = self._asked.pop(engine, None)
        if asked is not None:
            asked.set()
        task = self._tasks.pop(engine, None)
        if task is not None:
            task.cancel()

    def problem(self, engine: Engine) -> str | None:
        """What was wrong with `engine` when it was asked last, in a sentence; None if nothing."""
        return self._problems.get(engine)

    async def close(self) -> None:
        """Stop watching and close connections. Idempotent."""
        tasks, self._tasks = self._tasks, {}
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        await self._asker.close()

    async def check(self, engine: Engine) -> str | None:
        """One health check; then the introduction of an engine that is not in the pool.

        One that is in it is asked which models it serves now.

        Returns:
            None, or what is wrong with it, in a sentence.
        """
        try:
            await self._health(engine)
            if engine.identity is None:
                await self._introduce(engine)
            else:
                await self._refresh_models(engine)
        except ProbeFailed as error:
            return str(error)
        return None

    async def _introduce(self, engine: Engine) -> None:
        identity = await self._introducer.introduce(engine)
        if self._learn is not None and identity.manifest is not None:
            await self._learn(identity.manifest)
        log.info("engine %s joins as %s: %s", engine.address, engine.role, identity)
        self._pool.join(engine, identity)

    async def _refresh_models(self, engine: Engine) -> None:
        """Learn which adapters the engine has loaded and unloaded since it was asked last.

        The answer is parsed each time: vLLM writes the time and random ids into it, so that no two
        are equal.
        """
        served = await self._introducer.served(engine)
        known = engine.identity
        if known is None:
            return  # it left while it was asked
        identity = replace(
            known,
            models=served.models,
            adapters=served.adapters,
            max_model_len=served.max_model_len,
        )
        if identity != known:
            log.info("engine %s now serves %s", engine.address, ", ".join(identity.models))
            self._pool.update_models(engine, identity)

    async def _watch(self, engine: Engine, asked: asyncio.Event) -> None:
        failures, told = 0, ""
        while True:
            try:
                problem = await self.check(engine)
            except Exception as error:  # one odd engine must not end its own watch
                log.exception("probe of %s", engine.address)
                problem = repr(error)
            asked.set()
            if problem is None:
                self._problems.pop(engine, None)
                failures, told = 0, ""
                await asyncio.sleep(self.interval_s)
                continue
            failures += 1
            self._problems[engine] = problem
            if (engine.identity is None or failures >= FAILED_CHECKS) and (
                self._pool.leave(engine) or problem != told
            ):
                log.warning("engine %s is not available: %s", engine.address, problem)
                told = problem
            await asyncio.sleep(self.interval_s)

    async def _health(self, engine: Engine) -> None:
        """Ask for its health, in the way of its family."""
        path = self._health_path or (
            self._family(engine.family).health_path if engine.identity is not None else None
        )
        if path == MODELS_PATH:
            return  # the introduction or the look at its models asks just that
        if path is not None:
            await self._get(engine, path)
            return
        try:
            await self._get(engine, "/health")
        except ProbeFailed as error:
            if error.status != 404:  # a plain OpenAI server may have no such page
                raise

    async def _get(self, engine: Engine, path: str) -> bytes:
        return (await self._asker.ask(engine, path, None, self.timeout_s)).body

    async def _post(self, engine: Engine, path: str, body: bytes) -> bytes:
        return (await self._asker.ask(engine, path, body, INTRODUCTION_S)).body
