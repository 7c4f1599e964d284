"""Starts a router that was built, and closes it."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvrouter.telemetry.caches import BoundedCache, bounds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvrouter.access.ports import Ports
    from kvrouter.app.core import Core
    from kvrouter.app.members import Members
    from kvrouter.app.services import Services
    from kvrouter.app.settings import RouterSettings
    from kvrouter.control.page.events import Events
    from kvrouter.control.page.snapshot import Snapshots
    from kvrouter.telemetry.request_log import RequestLog
    from kvrouter.telemetry.tracing.otlp import Exporter

STORE_WAIT_S: Final = 2.0
"""How long the start waits for the store, which may also come later."""
TRACES_S: Final = 3.0
"""How long the end waits for a collector to take the traces that are left."""
_SWEEP_S: Final = 0.1

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True, kw_only=True)
class App:
    """One router. `start`, then `close`; both on the loop that it was built on."""

    settings: RouterSettings  # as they are now
    core: Core
    members: Members
    services: Services
    ports: Ports
    snapshots: Snapshots | None  # None: there is no control port
    events: Events | None  # the same
    caches: Mapping[str, BoundedCache]
    lines: RequestLog | None  # None: requests are not logged
    exporter: Exporter | None  # None: nothing is traced
    started: asyncio.Event  # set once every engine has been probed
    _tasks: list[asyncio.Task[None]] = field(default_factory=list, init=False)

    async def start(self) -> int:
        """Open the ports and probe every engine once; returns the public port.

        Raises:
            OSError: an address cannot be bound.
        """
        settings, core, members = self.settings, self.core, self.members
        if core.store is not None:
            await core.store.start(STORE_WAIT_S)
        caches = bounds({"kv_index": core.index, **self.caches})
        log.info("memory at most: %s, bodies %s", caches, settings.max_body_memory.human_readable())
        core.access.advise(settings.host, plain=not settings.ssl_certfile)
        port = await self.ports.listen(settings.host, settings.port, settings)
        if self.snapshots is not None:
            self.snapshots.start()
        core.timer.add(core.keep_alive)
        self._tasks.append(asyncio.create_task(self._sweep(), name="sweep"))
        for engine in core.pool.all():
            members.prober.watch(engine)
        members.life.start()
        await members.discovery.start()
        await members.prober.probed()
        self.started.set()
        if members.group is not None:
            members.group.start(port)
        return port

    async def close(self) -> None:
        """Cut off requests in flight, then release everything. Idempotent."""
        core, members, services = self.core, self.members, self.services
        await self.ports.close()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await members.discovery.close()
        await members.life.close()
        await members.prober.close()
        if members.intake is not None:
            members.intake.close()
        core.tokens.close()
        remotes = (self.snapshots, services.canary, services.releases, core.store)
        for remote in (*remotes, members.group, members.redis):
            if remote is not None:
                await remote.close()
        core.metrics.settle()
        core.client.close()
        core.timer.close()
        if self.lines is not None:
            self.lines.flush()
        if self.exporter is not None:
            await asyncio.to_thread(self.exporter.close, TRACES_S)

    async def _sweep(self) -> None:
        """Take what gone engines held out of the index, a little at a time; see to late events."""
        failed = 0
        while True:
            await asyncio.sleep(_SWEEP_S)
            try:
                self._sweep_some()
            except Exception:
                failed += 1
                if failed.bit_count() == 1:  # it may fail ten times a second
                    log.exception("KV events: what was due could not be done (%d so far)", failed)

    def _sweep_some(self) -> None:
        self.core.index.sweep()
        if self.core.tracker is not None:
            self.core.tracker.tick()
        if self.core.nodes is not None and self.core.nodes.index is not None:
            self.core.nodes.index.tick()
