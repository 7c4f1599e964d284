"""The process of `kvrouter serve`: its signals, its log, its exit code."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from typing import TYPE_CHECKING, Final

import uvloop

from kvrouter import log as request_log
from kvrouter.app import App
from kvrouter.flags import UsageError
from kvrouter.reload import follow
from kvrouter.tokens import TokenizerUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrouter.config import RouterSettings

GRACE_S: Final = 30.0

log = logging.getLogger(__name__)


def run(settings: RouterSettings, reread: Callable[[], RouterSettings]) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code.

    Args:
        settings: to begin with.
        reread: loads them anew, on SIGHUP; raises UsageError where they cannot be used.

    Raises:
        OSError: an address cannot be bound.
    """
    lines = request_log.set_up(settings.log_level)
    try:
        app = App(settings, lines)
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
    stop = asyncio.Event()

    def reload() -> None:
        try:
            follow(app, reread())
        except UsageError as error:
            log.error("SIGHUP: everything stays as it is: %s", error)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        port = await app.start()
        loop.add_signal_handler(signal.SIGHUP, reload)
        _quiet_collector()
        _say_where(app, port)
        await stop.wait()
        log.info("closing: requests under way get %g s", GRACE_S)
        await app.close(GRACE_S)
    finally:
        await app.close()
