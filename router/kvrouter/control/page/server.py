"""The server of the control port: the router's own, with smaller bounds than the public port's.

What strangers do here may take nothing that requests and engines need.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kvrouter.http.server.limits import Limits
from kvrouter.http.server.listener import HttpServer
from kvrouter_store.descriptors import connections

if TYPE_CHECKING:
    from kvrouter.http.server.listener import Handler

GRACE_S: Final = 2.0  # for answers in flight when it closes; idle connections close at once
LIMITS: Final = Limits(
    connections=64,
    backlog=16,
    refused=16,
    handshakes=32,
    body_bytes=1 << 20,
    body_memory_bytes=8 << 20,
    body_timeout_s=10.0,
    idle_timeout_s=30.0,
    write_timeout_s=30.0,
)


class WebServer(HttpServer):
    """Serves what operators and Prometheus ask for. Make it after the limit of files is raised."""

    def __init__(self, handler: Handler) -> None:
        most = connections(LIMITS.connections, 1)
        # asyncio accepts a whole backlog in each turn of its loop, and closes what is refused some
        # turns later: four of them are open at a time.
        backlog = LIMITS.backlog if most == LIMITS.connections else LIMITS.backlog // 4
        super().__init__(handler, replace(LIMITS, connections=most, backlog=backlog))

    async def close(self, grace_s: float = GRACE_S) -> None:
        """As `HttpServer.close`."""
        await super().close(grace_s)
