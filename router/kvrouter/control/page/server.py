"""Serves a Quart app on a port of its own, on the running event loop.

Imported only with a control port, because Quart and hypercorn take a quarter of a second to import.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from typing import TYPE_CHECKING, Final

from hypercorn.asyncio import serve
from hypercorn.config import Config

from kvrouter.http.server.limits import Limits
from kvrouter_store.connection.keep_alive import keep_alive
from kvrouter_store.system_errors import cannot_listen

if TYPE_CHECKING:
    import ssl

    from quart import Quart

KEEP_ALIVE_S: Final = 30.0
GRACE_S: Final = 2.0
"""For answers in flight when it closes; idle connections close at once."""


class WebServer:
    """Serves one app on one address, as `HttpServer` serves handlers."""

    def __init__(self, app: Quart) -> None:
        self._app = app
        self._door: socket.socket | None = None
        self._serving: _Serving | None = None

    @property
    def port(self) -> int:
        """The port it listens on; raises RuntimeError when it does not listen."""
        if self._door is None:
            raise RuntimeError("the server does not listen")
        return int(self._door.getsockname()[1])

    async def listen(self, host: str, port: int, *, tls: ssl.SSLContext | None = None) -> int:
        """Serve on `host` and `port` (0: any free one); returns the port. OSError: a sentence."""
        v6 = ":" in host
        family = socket.AF_INET6 if v6 else socket.AF_INET
        try:
            self._door = socket.create_server((host, port), family=family, dualstack_ipv6=v6)
            keep_alive(self._door)
        except OSError as error:
            raise cannot_listen(host, port, error) from None
        self._door.setblocking(False)
        self._serving = _Serving(self._app, self._door, tls)
        return self.port

    async def renew(self, tls: ssl.SSLContext) -> None:
        """Use these certificates for new connections. OSError: there are no descriptors left.

        The socket stays open, so that no client is refused. The previous server closes its idle
        connections and ends when its answers have ended; its TLS sessions are not resumed.
        """
        before = self._serving
        if self._door is None or before is None:
            return
        self._serving = _Serving(self._app, self._door, tls)
        await before.end()

    async def close(self) -> None:
        """Stop listening; answers in flight get GRACE_S to end. Idempotent."""
        door, self._door = self._door, None
        serving, self._serving = self._serving, None
        if serving is not None:
            await serving.end()
        if door is not None:
            door.close()


class _Serving:
    """One hypercorn on a copy of a listening socket."""

    def __init__(self, app: Quart, door: socket.socket, tls: ssl.SSLContext | None) -> None:
        config = _Config(tls)
        config.bind = [f"fd://{os.dup(door.fileno())}"]
        self._stop = asyncio.Event()
        serving = serve(app, config, shutdown_trigger=self._stop.wait)
        self._task = asyncio.create_task(serving, name="control port")

    async def end(self) -> None:
        """Stop it, and wait until it has ended."""
        self._stop.set()
        await asyncio.wait({self._task}, timeout=2 * GRACE_S)
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


class _Config(Config):
    """Hypercorn's settings, with a given TLS context."""

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        super().__init__()
        self.keep_alive_timeout = KEEP_ALIVE_S
        self.include_server_header = False
        self.graceful_timeout = GRACE_S
        self.ssl_handshake_timeout = Limits().handshake_timeout_s
        self.errorlog = logging.getLogger(__name__)
        self._given = tls

    @property
    def ssl_enabled(self) -> bool:
        return self._given is not None

    def create_ssl_context(self) -> ssl.SSLContext | None:
        return self._given
