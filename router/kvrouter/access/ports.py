"""The router's ports: the public one, and the optional control port."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterable

    from kvrouter.access.settings import PortSettings
    from kvrouter.http.server.listener import HttpServer
    from kvrouter.http.server.respond import Row

CONTROL: Final = frozenset({"/workers", "/workers/", "/metrics"})
"""Endpoints that a control port takes over."""
BOTH: Final = frozenset({"/health", "/ready", "/ping", "/live", "/version"})

log = logging.getLogger(__name__)


def split(rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """Endpoints of the public port, and those of a control port."""
    listed = list(rows)
    public = [row for row in listed if row[1] not in CONTROL]
    return public, [row for row in listed if row[1] in CONTROL | BOTH]


@dataclass(eq=False)
class Ports:
    """Opens and closes both servers; `control` needs no key, and may be None."""

    public: HttpServer
    control: HttpServer | None
    _tls: ssl.SSLContext | None = field(default=None, init=False)
    _renewing: asyncio.Task[None] | None = field(default=None, init=False)

    async def listen(self, host: str, port: int, settings: PortSettings) -> int:
        """Open both; returns the public port. Raises OSError with a sentence."""
        self._tls = settings.port_tls()
        if self.control is not None:
            await self.control.listen(
                settings.control_host, settings.control_port or 0, tls=self._tls
            )
        return await self.public.listen(host, port, tls=self._tls)

    @property
    def scheme(self) -> str:
        """Scheme of the URLs of both."""
        return "http" if self._tls is None else "https"

    def follow(self, settings: PortSettings) -> None:
        """Use the certificates as their files are now, for new connections.

        If they cannot be used, nothing changes.
        """
        try:
            tls = settings.port_tls()
        except ValueError as error:
            log.error("SIGHUP: the router keeps its certificates: %s", error)
            return
        if (tls is None) != (self._tls is None):
            log.warning("--ssl-certfile: restart the router to switch TLS on or off")
        elif tls is not None:
            before, self._tls = self._renewing, tls
            self._renewing = asyncio.create_task(self._renew(before, tls), name="certificates")

    async def renewed(self) -> None:
        """Wait until the change that `follow` began is done."""
        if self._renewing is not None:
            await asyncio.shield(self._renewing)

    async def close(self) -> None:
        """Cut off requests in flight; the control port answers until they have ended."""
        if self._renewing is not None:
            await self._renewing
        await self.public.close()
        if self.control is not None:
            await self.control.close()

    async def _renew(self, before: asyncio.Task[None] | None, tls: ssl.SSLContext) -> None:
        if before is not None:
            await before
        for server in filter(None, (self.public, self.control)):
            try:
                await server.renew(tls)
            except OSError as error:
                log.error("the router keeps its certificates: %s", error)
        log.info("new connections get the certificates as they are now")
