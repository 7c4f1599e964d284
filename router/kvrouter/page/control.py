"""The control port: the page with its document, and what else belongs on it, by Quart.

Imported only where the port is open: Quart and hypercorn take a quarter of a second to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrouter.page.server import WebServer
from kvrouter.page.snapshot import Snapshots
from kvrouter.page.web import control_app

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterable

    from kvrouter.http.server import Handler
    from kvrouter.page.snapshot import Sources


class ControlSide:
    """All of it, as a server like `HttpServer`. `listen`, then `close`, both on the running loop.

    Args:
        sources: what the document is made of.
        rows: method, path and handler of everything beside the page.
        token: that the document asks for; "" for none.
    """

    def __init__(
        self, sources: Sources, rows: Iterable[tuple[str, str, Handler]], token: str = ""
    ) -> None:
        self._snapshots = Snapshots(sources)
        self._server = WebServer(control_app(rows, self._snapshots.document, token))
        self.renew = self._server.renew

    @property
    def port(self) -> int:
        """The port it listens on; raises RuntimeError when it does not listen."""
        return self._server.port

    async def listen(self, host: str, port: int, *, tls: ssl.SSLContext | None = None) -> int:
        """Serve on `host` and `port` (0: any free one); returns the port.

        Raises:
            OSError: the address cannot be bound.
        """
        port = await self._server.listen(host, port, tls=tls)
        self._snapshots.start()
        return port

    async def close(self) -> None:
        """Stop serving, then stop looking. Idempotent."""
        await self._server.close()
        await self._snapshots.close()
