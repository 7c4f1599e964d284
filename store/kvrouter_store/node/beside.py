"""What runs beside a node, in a thread of its own: events for routers, and the tiers below it."""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvrouter_store._core import StoreServer
from kvrouter_store.connection.tls import ClientTls
from kvrouter_store.events.publisher import EventSockets
from kvrouter_store.node.block_events import BlockEvents
from kvrouter_store.node.feed import FeedReader, readable
from kvrouter_store.node.settings import StoreSettings
from kvrouter_store.node.start_checks import tokens_of
from kvrouter_store.node.tiers import tier_side
from kvrouter_store.tiers.base import Tier
from kvrouter_store.tiers.guard import Guard

STOP_S = 10.0
Work = Callable[[], Coroutine[Any, Any, None]]
log = logging.getLogger(__name__)


@contextmanager
def serving_beside(
    server: StoreServer,
    settings: StoreSettings,
    tiers: Sequence[Tier],
    events: EventSockets | None,
    *,
    url: str,
    tls: ClientTls,
) -> Iterator[Sequence[Guard]]:
    """Serve `tiers` and `events` of the started node until this ends.

    url, tls: where the node reaches itself.
    """
    if not tiers and events is None:
        yield ()
        return
    feed = FeedReader(server)
    work: list[Work] = [feed.run]
    side = tier_side(server, settings, tiers, url, tls) if tiers else None
    if side is not None:
        feed.followers.append(side)
        work.append(side.serve)
    if events is not None:
        topic = settings.kv_events_config.topic or f"kv@{url.partition('://')[2]}"
        tenant = next((name for name, _ in tokens_of(settings)), "")
        publisher = BlockEvents(server, events, topic, tenant)
        feed.followers.append(publisher)
        work.append(publisher.serve)
    thread = SideThread(work)
    try:
        yield side.guards if side is not None else ()
    finally:
        if thread.end() and side is not None:
            side.close()


class SideThread:
    """Runs all of `work` in an event loop of its own, from now on until `end`."""

    def __init__(self, work: Sequence[Work]) -> None:
        self._work = work
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kvstore-side", daemon=True)
        self._thread.start()

    def end(self) -> bool:
        """Cancel the work; returns whether it has ended, within STOP_S."""
        os.eventfd_write(self._stop, 1)
        self._thread.join(STOP_S)
        ended = not self._thread.is_alive()
        if ended:
            os.close(self._stop)
        return ended

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception:
            log.exception("events of this node and the tiers below it are not served any more")

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each()) for each in self._work]
            await readable(self._stop)
            for task in tasks:
                task.cancel()
