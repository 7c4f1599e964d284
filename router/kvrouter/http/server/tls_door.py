"""Accepts connections that begin with a TLS handshake, and bounds those that have not ended theirs.

asyncio shows a connection to its protocol after the handshake. Without bounds, connections that
never say anything would take the descriptors of the whole process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable, Sequence

    from kvrouter.http.server.limits import Limits

ACCEPTS_IN_A_ROW: Final = 64
PAUSE_S: Final = 0.1
"""Without descriptors, connections stay in the kernel's queue for so long."""
SHUTDOWN_S: Final = 5.0

log = logging.getLogger(__name__)


@dataclass(eq=False)
class TlsDoor:
    """Listens on bound sockets, which it owns, until `close`; handshakes under way then go on."""

    sockets: Sequence[socket.socket]
    tls: ssl.SSLContext
    make: Callable[[], asyncio.Protocol]  # the protocol of one connection
    limits: Limits

    _handshakes: dict[asyncio.Task[None], None] = field(default_factory=dict)  # the oldest first

    def start(self, backlog: int) -> None:
        """Accept from now on."""
        for door in self.sockets:
            door.listen(backlog)
            door.setblocking(False)
            self._watch(door)

    def close(self) -> None:
        """Accept no more. Idempotent."""
        for door in self.sockets:
            if door.fileno() >= 0:
                asyncio.get_running_loop().remove_reader(door)
                door.close()

    def _watch(self, door: socket.socket) -> None:
        if door.fileno() >= 0:
            asyncio.get_running_loop().add_reader(door, self._accept, door)

    def _accept(self, door: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(ACCEPTS_IN_A_ROW):
            try:
                link, _ = door.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("no connection can be accepted: %s", error.strerror)
                loop.remove_reader(door)
                loop.call_later(PAUSE_S, self._watch, door)
                return
            if len(self._handshakes) >= self.limits.handshakes:
                next(iter(self._handshakes)).cancel()
            task = loop.create_task(self._shake_hands(link), name="TLS handshake")
            self._handshakes[task] = None
            task.add_done_callback(self._handshakes.pop)

    async def _shake_hands(self, link: socket.socket) -> None:
        link.setblocking(False)
        with contextlib.suppress(OSError):  # TLS's errors and time-outs are such
            await asyncio.get_running_loop().connect_accepted_socket(
                self.make,
                link,
                ssl=self.tls,
                ssl_handshake_timeout=self.limits.handshake_timeout_s,
                ssl_shutdown_timeout=SHUTDOWN_S,
            )
