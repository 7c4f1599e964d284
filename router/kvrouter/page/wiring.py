"""Puts the control side of one router together. Imported only where its port is open."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrouter.page.control import ControlSide
from kvrouter.page.model import Load
from kvrouter.page.snapshot import Sources
from kvrouter.page.tiers import StoreWatch
from kvrouter.readings import index_state

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvrouter.app import App
    from kvrouter.http.server import Handler
    from kvrouter.kv_ledger import EventLedger
    from kvrouter.page.board import Board
    from kvrouter.status import Status
    from kvstore.aio import AsyncStoreClient


def control_side(
    app: App,
    board: Board,
    status: Status,
    rows: Iterable[tuple[str, str, Handler]],
    *,
    ledger: EventLedger | None,
    client: AsyncStoreClient | None,
) -> ControlSide:
    """What is served on the control port of `app`: `rows`, and the page."""

    def load() -> Load:
        return Load(
            running=app.metrics.running,
            limit=app.settings.max_concurrent_requests,
            waiting=app.entrance.waiting,
            waiting_for_engine=app.standby.waiting,
            queue_size=app.settings.queue_size,
        )

    sources = Sources(
        pool=app.pool,
        metrics=app.metrics,
        board=board,
        condition=status.condition,
        index_state=lambda engine: index_state(ledger, engine),
        problem=app.prober.problem,
        load=load,
        store=StoreWatch(client) if client is not None else None,
        policy=app.settings.policy,
    )
    return ControlSide(sources, rows, app.settings.admin_token.get_secret_value())
