"""Health checks and identification of engines: one task per engine, which updates the pool."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kvrouter.engines.families import AUTO
from kvrouter.engines.families.pages import ProbeFailed
from kvrouter.membership.detect import MODELS_PATH, EngineDetector
from kvrouter.membership.probe_client import ProbeClient

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from kvrouter.credentials.engine_keys import WorkerKeys
    from kvrouter.credentials.tls import Trust
    from kvrouter.engines.engine import Engine
    from kvrouter.engines.families import Families
    from kvrouter.engines.pool import EnginePool

IDENTIFICATION_S: Final = 60.0
"""Time for the request of one token: it waits its turn among the engine's other requests."""
FAILED_CHECKS: Final = 2
"""Failed health checks in a row after which an engine leaves the pool."""

log = logging.getLogger(__name__)


class Prober:
    """Watches engines: those that are well join the pool, the others leave it.

    Args:
        pool: of the engines.
        families: the dialects.
        connector: the family of all engines, or "auto".
        interval_s: between two health checks of one engine; may change.
        timeout_s: for one answer of an engine; may change.
        model: see `EngineDetector`, as for `bootstrap_ports`, `rank_counts` and `try_priority`.
        bootstrap_ports: see above.
        rank_counts: see above.
        try_priority: see above.
        worker_keys: API keys of engines; None: none.
        trust: certificate authorities of engines with HTTPS; None: those of this machine.
        learn: is awaited with the manifest of an engine before it joins.
    """

    def __init__(
        self,
        pool: EnginePool,
        families: Families,
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
        self._families = families
        self.interval_s = interval_s
        self.timeout_s = timeout_s
        self._detector = EngineDetector(
            families,
            self._get,
            self._post,
            connector=connector,
            model=model,
            bootstrap_ports=bootstrap_ports,
            rank_counts=rank_counts,
            try_priority=try_priority,
        )
        self._connector = connector
        self._learn = learn
        self._client = ProbeClient(worker_keys, trust)
        self._tasks: dict[Engine, asyncio.Task[None]] = {}
        self._probed: dict[Engine, asyncio.Event] = {}
        self._problems: dict[Engine, str] = {}

    async def start(self, engines: Iterable[Engine]) -> None:
        """Watch `engines`; returns when each was probed once, or after `timeout_s`."""
        self.begin(engines)
        await self.probed()

    def begin(self, engines: Iterable[Engine]) -> None:
        """Watch `engines` from now on."""
        for engine in engines:
            self.watch(engine)

    async def probed(self) -> None:
        """Return when each watched engine was probed once, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.timeout_s):
                await asyncio.gather(*(probed.wait() for probed in self._probed.values()))

    def watch(self, engine: Engine) -> None:
        """Watch one more engine from now on."""
        probed = self._probed[engine] = asyncio.Event()
        watching = self._watch(engine, probed)
        self._tasks[engine] = asyncio.create_task(watching, name=f"probe {engine.address}")

    def forget(self, engine: Engine) -> None:
        """Watch `engine` no longer."""
        self._problems.pop(engine, None)
        probed = self._probed.pop(engine, None)
        if probed is not None:
            probed.set()
        task = self._tasks.pop(engine, None)
        if task is not None:
            task.cancel()

    def problem(self, engine: Engine) -> str | None:
        """What was wrong with `engine` at its last probe, in a sentence; None: nothing."""
        return self._problems.get(engine)

    async def close(self) -> None:
        """Stop watching and close connections. Idempotent."""
        tasks, self._tasks = self._tasks, {}
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        await self._client.close()

    async def check(self, engine: Engine) -> str | None:
        """Check its health; then identify it if it is not in the pool, else refresh its models.

        Returns:
            what is wrong with it, in a sentence; None: nothing.
        """
        try:
            await self._health(engine)
            if engine.identity is None:
                await self._identify(engine)
            else:
                await self._refresh_models(engine)
        except ProbeFailed as error:
            return str(error)
        return None

    async def _identify(self, engine: Engine) -> None:
        identity = await self._detector.identify(engine)
        if self._learn is not None and identity.manifest is not None:
            await self._learn(identity.manifest)
        log.info("engine %s joins as %s: %s", engine.address, engine.role, identity)
        self._pool.join(engine, identity)

    async def _refresh_models(self, engine: Engine) -> None:
        """Find out which adapters the engine has loaded and unloaded."""
        served = await self._detector.served(engine)
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
            self._pool.update_models(engine, identity)

    async def _watch(self, engine: Engine, probed: asyncio.Event) -> None:
        failures, logged = 0, ""
        while True:
            try:
                problem = await self.check(engine)
            except Exception as error:  # an unexpected answer must not end the watch
                log.exception("probe of %s", engine.address)
                problem = repr(error)
            probed.set()
            if problem is None:
                self._problems.pop(engine, None)
                failures, logged = 0, ""
                await asyncio.sleep(self.interval_s)
                continue
            failures += 1
            self._problems[engine] = problem
            if (engine.identity is None or failures >= FAILED_CHECKS) and (
                self._pool.leave(engine) or problem != logged
            ):
                log.warning("engine %s is not available: %s", engine.address, problem)
                logged = problem
            await asyncio.sleep(self.interval_s)

    async def _health(self, engine: Engine) -> None:
        """Check its health page; a page that detection or the list of models asks is not needed."""
        family = self._connector
        if family == AUTO and engine.identity is not None:
            family = engine.family
        path = "/health" if family == AUTO else self._families.named(family).health_path
        if path == MODELS_PATH:
            return
        try:
            await self._get(engine, path)
        except ProbeFailed as error:
            if family != AUTO or error.status != 404:  # a plain OpenAI server may have no such page
                raise

    async def _get(self, engine: Engine, path: str) -> bytes:
        return (await self._client.ask(engine, path, None, self.timeout_s)).body

    async def _post(self, engine: Engine, path: str, body: bytes) -> bytes:
        return (await self._client.ask(engine, path, body, IDENTIFICATION_S)).body
