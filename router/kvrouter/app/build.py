"""Builds a router from its settings: settings in, an `App` out that can be started, and closed."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvrouter.access.gate import Gate
from kvrouter.app.control_side import make_control_side, readings
from kvrouter.app.core import Core, make_core
from kvrouter.app.members import make_members
from kvrouter.app.services import Services, make_services
from kvrouter.control.admin import PATH as WORKERS
from kvrouter.control.page.board import Board
from kvrouter.fates.recent import Recent
from kvrouter.http.server.cors import Cors
from kvrouter.http.server.listener import HttpServer
from kvrouter.http.server.routes import Routes, on_exchange
from kvrouter.openai.endpoints import BELOW, ENDPOINTS, LOAD
from kvrouter.serving.handler import RequestHandler
from kvrouter.serving.legs.leg import KINDS
from kvrouter.serving.passthrough import FleetLoad
from kvrouter.serving.request.caller_salt import CallerSalts
from kvrouter.serving.request.evidence import Witness
from kvrouter.serving.request.versions import Versions
from kvrouter.serving.settle import Settler
from kvrouter.telemetry.series import BoundedCache, bounds
from kvrouter.telemetry.tracing.trace import start_traces

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvrouter.access.ports import Ports
    from kvrouter.app.members import Members
    from kvrouter.app.settings import RouterSettings
    from kvrouter.control.page.events import Events
    from kvrouter.control.page.snapshot import Snapshots
    from kvrouter.http.server.routes import Route
    from kvrouter.telemetry.request_log import RequestLog
    from kvrouter.telemetry.tracing.otlp import Exporter
    from kvrouter.telemetry.tracing.trace import Tracing
    from kvrouter_store.log import LogWriter

STORE_WAIT_S: Final = 2.0  # how long the start waits for the store, which may also come later
TRACES_S: Final = 3.0  # how long the end waits for a collector to take the traces that are left
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
        services.recorder.flush()
        if services.recorder.file is not None:
            await asyncio.to_thread(services.recorder.file.close)
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


def build(
    settings: RouterSettings, lines: RequestLog | None = None, writer: LogWriter | None = None
) -> App:
    """Build the router on the loop that will run it.

    Args:
        settings: of `kvrouter serve`.
        lines: takes a line per request, or None.
        writer: writes the log, and counts what it drops; None: nothing is dropped.

    Raises:
        TokenizerUnavailable: `--tokenizer` cannot be loaded.
        UsageError: a file of keys has changed since the settings were checked.
        OSError: `--kv-events-bind` cannot be bound, or `--record` opened.
    """
    core = make_core(settings)
    members = make_members(core)
    instance, started = f"{settings.host}:{settings.port}", asyncio.Event()
    tracing, exporter = start_traces(settings, instance, core.metrics)
    services = make_services(core, members.group)
    lines = lines if settings.access_log else None
    board = Board() if settings.control_port is not None else None
    recent = Recent(settings.session_header) if board is not None else None
    witness = Witness(
        store=core.store,
        looks=services.inputs_builder.needs_hashes,
        difference=members.compatibility.difference,
    )
    settler = Settler(core.metrics, lines, tracing, services.recorder, witness, recent)
    routes = Routes(_served(core, services, settler, tracing, board))
    gate = Gate(core.access.ring, routes.handle, core.metrics, lines)
    origins = frozenset(settings.cors_allow_origin)
    cors = Cors(origins, WORKERS) if origins else None
    at_head = cors.before(gate.at_head) if cors is not None else gate.at_head
    server = HttpServer(gate.handle, settings.limits, at_head, cors)
    control = make_control_side(core, members, services, server, board, recent, started)
    routes.add((method, path, on_exchange(respond)) for method, path, respond in control.rows)
    caches: dict[str, BoundedCache] = {
        "tokens": core.tokens,
        "block_hashes": core.hash_cache,
        "in_flight": services.inputs_builder.in_flight,
    }
    if core.tracker is not None:
        caches.update({f"kv_{tier}": of for tier, of in core.tracker.lower.indexes.items()})
    for reading in readings(core, members, services, caches, server, writer):
        core.metrics.add(reading)
    return App(
        settings=settings,
        core=core,
        members=members,
        services=services,
        ports=control.ports,
        snapshots=control.snapshots,
        events=control.events,
        caches=caches,
        lines=lines,
        exporter=exporter,
        started=started,
    )


def _served(
    core: Core,
    services: Services,
    settler: Settler,
    tracing: Tracing | None,
    board: Board | None,
) -> list[Route]:
    """The endpoints that engines serve; the status page shows those with legs."""
    versions = Versions(
        pool=core.pool,
        models=core.models,
        engine_wait=core.engine_wait,
        session_key=core.settings.session_header,
        metrics=core.metrics,
    )
    salts = CallerSalts(tenants=core.queue_wait.tenants, pool=core.pool, families=core.families)
    handlers = [
        RequestHandler(
            service=service,
            queue_wait=core.queue_wait,
            gates=core.gates,
            engine_wait=core.engine_wait,
            models=core.models,
            versions=versions,
            streams=core.keep_alive.streams,
            metrics=core.metrics,
            settler=settler,
            tracing=tracing,
            observer=observer,
            route_headers=core.settings.route_headers,
            salts=salts if core.settings.salt_from_key else None,
        )
        for service, observer in ((services.completions, board), (services.passthrough, None))
    ]
    with_legs, passed_through = handlers
    return [
        *(("POST", path, with_legs.serve) for path in KINDS),
        *((one.method, one.path, passed_through.serve) for one in ENDPOINTS),
        ("POST", BELOW, passed_through.serve),
        ("GET", LOAD, FleetLoad(core.client, core.pool).serve),
    ]
