"""Builds a router from its settings: settings in, an `App` out that can be started."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvrouter.access.gate import Gate
from kvrouter.app.control_side import make_control_side, readings
from kvrouter.app.core import Core, make_core
from kvrouter.app.lifecycle import App
from kvrouter.app.members import make_members
from kvrouter.app.services import Services, make_services
from kvrouter.control.admin import PATH as WORKERS
from kvrouter.control.page.board import Board
from kvrouter.http.server.cors import Cors
from kvrouter.http.server.listener import HttpServer
from kvrouter.http.server.routes import Routes, on_exchange
from kvrouter.openai.endpoints import BELOW, ENDPOINTS, LOAD
from kvrouter.serving.handler import RequestHandler
from kvrouter.serving.legs.leg import KINDS
from kvrouter.serving.passthrough import FleetLoad
from kvrouter.serving.request.caller_salt import CallerSalts
from kvrouter.serving.request.versions import Versions
from kvrouter.serving.settle import Settler
from kvrouter.telemetry.tracing.trace import start_traces

if TYPE_CHECKING:
    from kvrouter.app.settings import RouterSettings
    from kvrouter.http.server.routes import Route
    from kvrouter.telemetry.caches import BoundedCache
    from kvrouter.telemetry.request_log import RequestLog
    from kvrouter.telemetry.tracing.trace import Tracing
    from kvrouter_store.log import LogWriter


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
        OSError: `--kv-events-bind` cannot be bound.
    """
    core = make_core(settings)
    members = make_members(core)
    instance, started = f"{settings.host}:{settings.port}", asyncio.Event()
    tracing, exporter = start_traces(settings, instance, core.metrics)
    services = make_services(core, members.group)
    lines = lines if settings.access_log else None
    board = Board() if settings.control_port is not None else None
    routes = Routes(_served(core, services, Settler(core.metrics, lines, tracing), tracing, board))
    gate = Gate(core.access.ring, routes.handle, core.metrics, lines)
    origins = frozenset(settings.cors_allow_origin)
    cors = Cors(origins, WORKERS) if origins else None
    at_head = cors.before(gate.at_head) if cors is not None else gate.at_head
    server = HttpServer(gate.handle, settings.limits, at_head, cors)
    control = make_control_side(core, members, services, server, board, started)
    routes.add((method, path, on_exchange(respond)) for method, path, respond in control.rows)
    caches: dict[str, BoundedCache] = {
        "tokens": core.tokens,
        "block_hashes": core.hash_cache,
        "in_flight": services.inputs_builder.in_flight,
    }
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
