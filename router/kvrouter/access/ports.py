"""The router's ports: the public one, and one for administration and metrics where it is apart."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterable

    from kvrouter.access.ports_settings import PortSettings
    from kvrouter.http.server.listener import HttpServer
    from kvrouter.http.server.respond import Row

CONTROL: Final = frozenset({"/workers", "/workers/", "/metrics"})
"""Served on the control port alone, where there is one."""
BOTH: Final = frozenset({"/health", "/ready", "/ping", "/live", "/version"})

log = logging.getLogger(__name__)


def split(rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """Endpoints of the public port, and those of the control port."""
    listed = list(rows)
    public = [row for row in listed if row[1] not in CONTROL]
    return public, [row for row in listed if row[1] in CONTROL | BOTH]


class Server(Protocol):
    """A server of one port: `HttpServer`, or `WebServer` of the control port."""

    @property
    def port(self) -> int:
        """The port it listens on."""

    async def listen(self, host: str, port: int, *, tls: ssl.SSLContext | None = None) -> int:
        """Accept connections; returns the port. Raises OSError."""

    async def renew(self, tls: ssl.SSLContext) -> None:
        """Show these certificates from now on. Raises OSError."""

    async def close(self) -> None:
        """Stop. Idempotent."""


class Ports:
    """Both servers, opened and closed together.

    Args:
        public: serves those who call the model.
        control: serves the control port, which needs no key; None: there is no such port.

    Attributes:
        public: the server of the public port.
        control: that of the control port.
    """

    def __init__(self, public: HttpServer, control: Server | None) -> None:
        self.public = public
        self.control = control
        self._tls: ssl.SSLContext | None = None
        self._renewing: asyncio.Task[None] | None = None

    async def listen(self, host: str, port: int, settings: PortSettings) -> int:
        """Open both; returns the public port.

        Raises:
            OSError: an address cannot be bound.
        """
        self._tls = settings.port_tls()
        if self.control is not None:
            await self.control.listen(
                settings.control_host, settings.control_port or 0, tls=self._tls
            )
        return await self.public.listen(host, port, tls=self._tls)

    @property
    def scheme(self) -> str:
        """Of the URLs of both."""
        return "http" if self._tls is None else "https"

    def follow(self, settings: PortSettings) -> None:
        """Show the certificates as their files stand now to those who connect from now on.

        What is connected stays as it is. Where they cannot be used, so does everything.
        """
        try:
            tls = settings.port_tls()
        except ValueError as error:
            log.error("SIGHUP: certificates stay as they are: %s", error)
            return
        if (tls is None) != (self._tls is None):
            log.warning("--ssl-certfile: to begin or end with TLS takes a restart")
        elif tls is not None:
            before, self._tls = self._renewing, tls
            self._renewing = asyncio.create_task(self._renew(before, tls), name="certificates")

    async def renewed(self) -> None:
        """Return when what `follow` began is done."""
        if self._renewing is not None:
            await asyncio.shield(self._renewing)

    async def close(self) -> None:
        """Cut off requests under way; the control port answers until they have ended."""
        if self._renewing is not None:
            await self._renewing
        await self.public.close()
        if self.control is not None:
            await self.control.close()

    async def _renew(self, before: asyncio.Task[None] | None, tls: ssl.SSLContext) -> None:
        if before is not None:
            await before
        servers: tuple[Server | None, ...] = (self.public, self.control)
        for server in servers:
            if server is None:
                continue
            try:
                await server.renew(tls)
            except OSError as error:
                log.error("certificates stay as they are: %s", error)
        log.info("certificates were read again")
