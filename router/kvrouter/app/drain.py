"""How the router stops serving: first new connections go elsewhere, then requests in flight end.

`HttpServer.close` then cuts off what has not ended in time.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from kvrouter.http.server.listener import HttpServer

log = logging.getLogger(__name__)


async def drain(
    server: HttpServer, *, delay_s: float, timeout_s: float, at_once: asyncio.Event
) -> bool:
    """Let requests in flight end; returns whether all have. The server does not listen afterwards.

    Args:
        server: its owner closes it afterwards.
        delay_s: how long it still accepts connections, so that load balancers can notice.
        timeout_s: for all of it, the delay included.
        at_once: ends the wait.
    """
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    server.drain()
    delay_s = min(delay_s, timeout_s)
    log.info("draining: not ready any more, new connections are accepted for %g s", delay_s)
    await _first(at_once.wait(), timeout_s=delay_s)
    server.stop_listening()
    left_s = began_s + timeout_s - loop.time()
    log.info("draining: requests on %d connections may end", server.connections)
    await _first(server.emptied(), at_once.wait(), timeout_s=left_s)
    if not server.connections:
        log.info("drained in %.3f s", loop.time() - began_s)
        return True
    log.warning(
        "cutting off requests on %d connections, %s",
        server.connections,
        "after a second signal" if at_once.is_set() else f"after --drain-timeout {timeout_s:g}",
    )
    return False


async def _first(*waits: Coroutine[None, None, object], timeout_s: float) -> None:
    """Wait until one of `waits` has ended, or the time is over."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=max(timeout_s, 0.0), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
