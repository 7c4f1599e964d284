"""The router's own endpoints: status, administration, the control port with its page, metrics."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvrouter.access.ports import Ports, split
from kvrouter.control.admin import Admin
from kvrouter.control.gauges import (
    counters,
    engine_gauges,
    index_gauges,
    index_state,
    load_gauges,
    node_index_gauges,
    prefill_queue_gauges,
    request_gauges,
    store_gauges,
)
from kvrouter.control.page.events import Events
from kvrouter.control.page.model import Load
from kvrouter.control.page.snapshot import Snapshots
from kvrouter.control.page.tiers import StoreWatches
from kvrouter.control.status import Status
from kvrouter.http.server.routes import on_path
from kvrouter.telemetry.series import Reading, cache_readings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kvrouter.app.core import Core
    from kvrouter.app.members import Members
    from kvrouter.app.services import Services
    from kvrouter.control.page.board import Board
    from kvrouter.fates.recent import Recent
    from kvrouter.http.server.listener import HttpServer
    from kvrouter.http.server.respond import Row
    from kvrouter.prefix.stores.base import StoreView
    from kvrouter.serving.legs.planning import PrefillQueueWait
    from kvrouter.telemetry.record_file import RecordFile
    from kvrouter.telemetry.series import BoundedCache
    from kvrouter_store.log import LogWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSide:
    """What the router serves besides the engines' endpoints."""

    rows: list[Row]  # endpoints of the public port
    ports: Ports
    snapshots: Snapshots | None  # None: there is no control port
    events: Events | None  # the same


def make_control_side(  # noqa: PLR0917
    core: Core,
    members: Members,
    services: Services,
    server: HttpServer,
    board: Board | None,
    recent: Recent | None,
    started: asyncio.Event,
) -> ControlSide:
    """Make it, for the public `server`; `board` and `recent` are there with a control port."""
    settings = core.settings
    status = Status(
        core.pool,
        core.metrics,
        asked=started.is_set,
        store_lacks=lambda: _lacks(core.store) if core.store is not None else [],
        aliases=lambda: core.models.aliases,
        draining=lambda: server.draining,
        admin=settings.admin,
        keys=lambda: core.access.asks,
        apart=board is not None,
    )
    rows, token = status.rows(), core.admin_token
    if settings.admin or board is not None:
        fleet = members.group.fleet if members.group is not None else members.fleet
        admin = Admin(core.pool, fleet, members.prober, token, core.tracker)
        rows += admin.rows(changes=settings.admin)
    if board is None or recent is None:
        return ControlSide(rows=rows, ports=Ports(server, None), snapshots=None, events=None)
    # Imported here because it is heavy, and most routers have no control port.
    from kvrouter.control.page.server import WebServer  # noqa: PLC0415
    from kvrouter.control.page.web import (  # noqa: PLC0415
        control_app,
        page_rows,
        store_size_row,
        why_rows,
    )

    public, control = split(rows)
    events = Events(members.prober.problem)
    core.pool.on_change(events.engine_changed)
    snapshots = _make_snapshots(core, members, services, board, events, status)
    sizes = store_size_row(services.recorder.curve.found, token)
    why = why_rows(recent, core.metrics.settle, token)
    page = (*page_rows(snapshots.document, token), *why)
    web = WebServer(control_app(on_path((*control, *page, sizes))))
    return ControlSide(rows=public, ports=Ports(server, web), snapshots=snapshots, events=events)


def _lacks(store: StoreView) -> list[str]:
    if not store.clients:
        return ["no node of the store is known"]
    if not store.nodes:
        return ["the store is not connected"] if store.away else []
    return [f"the store node {url} is not connected" for url in store.away]


def _make_snapshots(  # noqa: PLR0917
    core: Core,
    members: Members,
    services: Services,
    board: Board,
    events: Events,
    status: Status,
) -> Snapshots:
    store, queue_wait, engine_wait = core.store, core.queue_wait, core.engine_wait
    queue = services.queue
    return Snapshots(
        pool=core.pool,
        metrics=core.metrics,
        board=board,
        events=events,
        condition=status.condition,
        index_state=lambda engine: index_state(core.tracker, engine),
        problem=members.prober.problem,
        load=lambda: Load(
            running=core.metrics.running,
            limit=queue_wait.limit,
            waiting=queue_wait.waiting + core.gates.waiting,
            waiting_for_engine=engine_wait.waiting + (len(queue.queue.waiting) if queue else 0),
            queue_size=engine_wait.size,
        ),
        stores=StoreWatches(lambda: store.clients if store is not None else ()),
        store_sizes=services.recorder.store_sizes,
        policy=core.settings.policy,
    )


def readings(  # noqa: PLR0917
    core: Core,
    members: Members,
    services: Services,
    caches: Mapping[str, BoundedCache],
    server: HttpServer,
    writer: LogWriter | None,
) -> Iterator[Reading]:
    """Metrics that are read from the parts of the router at each scrape."""
    counts: dict[str, Mapping[str, int]] = {"tokenize": core.tokens.counts}
    if core.store is not None:
        counts["store_view"] = core.store.counts
        yield from store_gauges(core.store, services.recorder.store_sizes)
    yield from node_index_gauges(core.nodes.index if core.nodes is not None else None)
    if core.tracker is not None:
        counts["kv_event"] = core.tracker.counts
    yield from counters(counts)
    yield from _waits(core, services.queue)
    yield from engine_gauges(core.pool, members.compatibility)
    yield from index_gauges(core.pool, core.index, core.tracker)
    yield from cache_readings(caches)
    yield from members.discovery.readings()
    if members.group is not None:
        yield from members.group.readings()
    yield from _own(server, writer, services.recorder.file)


def _own(
    server: HttpServer, writer: LogWriter | None, file: RecordFile | None
) -> Iterator[Reading]:
    """Those of the process."""
    yield Reading(
        "kvrouter:tasks",
        "Tasks of the event loop: one per request in flight, one per engine, and a few.",
        lambda: len(asyncio.all_tasks()),
    )
    yield Reading(
        "kvrouter:draining",
        "1 while the router lets requests in flight end before it stops, else 0.",
        lambda: server.draining,
    )
    yield Reading(
        "kvrouter:incoming_body_bytes",
        "Bytes of bodies that have not arrived completely; --max-body-memory bounds them.",
        lambda: server.incoming_bytes,
    )
    yield Reading(
        "kvrouter:log_lines_dropped",
        "Lines of the log that were dropped because stderr is not read fast enough.",
        lambda: writer.dropped if writer is not None else 0,
        grows=True,
    )
    yield Reading(
        "kvrouter:record_lines_dropped",
        "Lines of --record that were lost because the disk is too slow, full or broken.",
        lambda: file.dropped if file is not None else 0,
        grows=True,
    )


def _waits(core: Core, queue: PrefillQueueWait | None) -> Iterator[Reading]:
    """What waits in the router's queues."""
    waiting: dict[str, Callable[[], int]] = {
        "capacity": lambda: core.queue_wait.waiting + core.gates.waiting,
        "engine": lambda: core.engine_wait.waiting,
    }
    if queue is not None:
        waiting["prefill"] = lambda: len(queue.queue.waiting)
    yield from prefill_queue_gauges(queue.queue if queue is not None else None)
    yield from request_gauges(waiting, core.budget)
    yield from load_gauges(
        core.pool, core.metrics, lambda: sum(count() for count in waiting.values())
    )
