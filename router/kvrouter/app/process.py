"""The process of `kvrouter serve`: its signals, its log, its exit code."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from typing import TYPE_CHECKING

import uvloop

from kvrouter.app.app import App
from kvrouter.app.drain import drain
from kvrouter.app.reload import Reload
from kvrouter.prefix.tokenize import TokenizerUnavailable
from kvrouter.telemetry import request_log
from kvrouter_store.node.signals import Signals

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrouter.app.settings import RouterSettings

log = logging.getLogger(__name__)


def run(settings: RouterSettings, reread: Callable[[], RouterSettings]) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code.

    Args:
        settings: to begin with.
        reread: loads them anew, on SIGHUP; raises UsageError where they cannot be used.

    Raises:
        OSError: an address cannot be bound.
    """
    lines, writer = request_log.set_up(settings.log_level)
    try:
        app = App(settings, lines, writer)
    except TokenizerUnavailable as error:
        log.error("%s", error)
        return 2
    uvloop.run(_main(app, reread))
    gc.unfreeze()  # so that the interpreter can take everything down, and says of nothing it leaks
    return 0


def _quiet_collector() -> None:
    """What start-up made stays: walking it again and again would only stop requests for a while.

    Requests leave no cycles behind, so the young generation may grow between two walks.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def _say_where(app: App, port: int) -> None:
    """Name the URLs on standard output, the public one first: all of them are open."""
    assert app.ports is not None
    scheme, control = app.ports.scheme, app.ports.control
    print(f"kvrouter ready: {scheme}://{app.settings.host}:{port}", flush=control is None)
    if control is not None:
        url = f"{scheme}://{app.settings.control_host}:{control.port}"
        print(f"kvrouter control: {url}", flush=True)


async def _main(app: App, reread: Callable[[], RouterSettings]) -> None:
    loop = asyncio.get_running_loop()
    signals = Signals()
    reload = Reload(app, reread)
    try:
        port = await _started(app, signals)
        if port is None:
            return
        loop.add_signal_handler(signal.SIGHUP, reload.begin)
        _quiet_collector()
        _say_where(app, port)
        await signals.leave.wait()
        await leave(app, signals)
    finally:
        await reload.close()
        await app.close()


async def _started(app: App, signals: Signals) -> int | None:
    """Start; the public port, or None where a signal came first."""
    starting = asyncio.create_task(app.start(), name="start")
    leaving = asyncio.create_task(signals.leave.wait(), name="signal")
    try:
        await asyncio.wait({starting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return await starting if starting.done() else None
    finally:
        for task in (starting, leaving):
            task.cancel()
        await asyncio.gather(starting, leaving, return_exceptions=True)


async def leave(app: App, signals: Signals) -> None:
    """Let requests under way end, within the times of the settings as they are now."""
    assert app.server is not None
    settings = app.settings
    # Whoever presses Ctrl-C waits for the end; no load balancer stands before that router.
    delay_s = 0.0 if signals.first is signal.SIGINT else settings.drain_delay_s
    await drain(
        app.server,
        delay_s=delay_s,
        timeout_s=settings.drain_timeout_s,
        at_once=signals.at_once,
    )
