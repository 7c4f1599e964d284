"""How a store node leaves: what is under way may end after one signal, not after a second."""

import asyncio
import logging
import signal
import time
from typing import Protocol

__all__ = ["Drainable", "Signals", "drain"]

log = logging.getLogger(__name__)


class Drainable(Protocol):
    """What can be drained, as `kvrouter_store._core.StoreServer`."""

    def drain(self) -> int:
        """Begin; a descriptor that can be read when the last connection has gone."""
        ...

    def stats(self) -> dict[str, int]:
        """What is held."""
        ...


class Signals:
    """SIGTERM and SIGINT of this process as two events. Needs the running loop."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        """The first signal, once it has come."""
        self.leave = asyncio.Event()
        """Set by the first signal."""
        self.at_once = asyncio.Event()
        """Set by the second."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._arrived, number)

    def _arrived(self, number: signal.Signals) -> None:
        if self.first is None:
            self.first = number
            self.leave.set()
        else:
            self.at_once.set()


async def drain(server: Drainable, timeout_s: float, at_once: asyncio.Event) -> bool:
    """Let what is under way at `server` end, for at most `timeout_s` seconds or until `at_once`.

    Returns:
        whether nobody was cut off.
    """
    loop, started = asyncio.get_running_loop(), time.monotonic()
    done = asyncio.Event()
    gone = server.drain()
    loop.add_reader(gone, done.set)
    ends = [asyncio.create_task(event.wait()) for event in (done, at_once)]
    try:
        log.info("draining: no connection is accepted any more")
        await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        loop.remove_reader(gone)
        for end in ends:
            end.cancel()
    if done.is_set():
        log.info("drained in %.3f s", time.monotonic() - started)
        return True
    held = server.stats()
    log.warning(
        "leaving %d connections with %d leases and %d blocks being written, %s",
        held["connections"],
        held["leases"],
        held["reserved_blocks"],
        "told to at once" if at_once.is_set() else f"after --drain-timeout {timeout_s:g}",
    )
    return False
