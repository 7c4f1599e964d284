"""The process of `kvrouter serve`: its signals, its log, its exit code.

`drain` is how the router stops serving: first new connections go elsewhere, then requests in flight
end. `HttpServer.close` cuts off what has not ended in time.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from typing import TYPE_CHECKING

import uvloop

from kvrouter.app.build import build
from kvrouter.app.reload import Reload
from kvrouter.http.server.large_blocks import return_large_blocks
from kvrouter.prefix.tokenize import TokenizerUnavailable
from kvrouter.telemetry import request_log
from kvrouter_store.descriptors import raise_limit
from kvrouter_store.node.signals import Signals

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from kvrouter.app.build import App
    from kvrouter.app.settings import RouterSettings
    from kvrouter.http.server.listener import HttpServer
    from kvrouter.telemetry.request_log import RequestLog
    from kvrouter_store.log import LogWriter

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


def run(settings: RouterSettings, reread: Callable[[], RouterSettings]) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code.

    Args:
        settings: to begin with.
        reread: loads them again, on SIGHUP; raises UsageError if they cannot be used.

    Raises:
        OSError: an address cannot be bound.
    """
    limit = raise_limit()
    return_large_blocks()
    lines, writer = request_log.set_up(settings.log_level, settings.log_format)
    log.info("%s", limit)
    for lack in settings.lacks:
        log.warning("%s", lack)
    try:
        uvloop.run(_main(settings, reread, lines, writer))
    except TokenizerUnavailable as error:
        log.error("%s", error)
        return 2
    gc.unfreeze()  # so that the interpreter can free everything, and reports no leaks
    return 0


def _quiet_collector() -> None:
    """What start-up made stays: walking it again and again would only stop requests for a while.

    Requests leave no cycles behind, so the young generation may grow between two walks.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def _print_urls(app: App, port: int) -> None:
    """Print the URLs, the public one first: all of them are open."""
    scheme, control, settings = app.ports.scheme, app.ports.control, app.settings
    print(f"kvrouter ready: {scheme}://{settings.host}:{port}", flush=control is None)
    if control is not None:
        url = f"{scheme}://{settings.control_host}:{control.port}"
        print(f"kvrouter control: {url}", flush=True)


async def _main(
    settings: RouterSettings,
    reread: Callable[[], RouterSettings],
    lines: RequestLog | None,
    writer: LogWriter,
) -> None:
    app, signals = build(settings, lines, writer), Signals()
    reload = Reload(app, reread)
    try:
        port = await _started(app, signals)
        if port is None:
            return
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload.begin)
        _quiet_collector()
        _print_urls(app, port)
        await signals.leave.wait()
        await leave(app.ports.public, app.settings, signals)
    finally:
        await reload.close()
        await app.close()


async def _started(app: App, signals: Signals) -> int | None:
    """Start; returns the public port, or None if a signal came first."""
    starting = asyncio.create_task(app.start(), name="start")
    leaving = asyncio.create_task(signals.leave.wait(), name="signal")
    try:
        await asyncio.wait({starting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return await starting if starting.done() else None
    finally:
        for task in (starting, leaving):
            task.cancel()
        await asyncio.gather(starting, leaving, return_exceptions=True)


async def leave(server: HttpServer, settings: RouterSettings, signals: Signals) -> None:
    """Let requests in flight end, within the times of the settings."""
    # After Ctrl-C the user waits for the end, and no load balancer stands before the router.
    delay_s = 0.0 if signals.first is signal.SIGINT else settings.drain_delay_s
    timeout_s = settings.drain_timeout_s
    await drain(server, delay_s=delay_s, timeout_s=timeout_s, at_once=signals.at_once)
