"""All connections to one engine: what they show of its life, and how they end together."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvrouter.http.client.pool import ClientConnection
    from kvrouter.http.failure import Failure


class OpenConnections:
    """All connections to one engine, also those in use by pools that are closed.

    Attributes:
        cut_off: why none may be made any more; "": they may.
    """

    def __init__(self) -> None:
        self._connections: set[ClientConnection] = set()
        self.cut_off = ""

    def __iter__(self) -> Iterator[ClientConnection]:
        return iter(self._connections)

    def add(self, connection: ClientConnection) -> bool:
        """Note a new connection; False: it was cut off at once."""
        if self.cut_off:
            connection.abort()
            return False
        self._connections.add(connection)
        return True

    def discard(self, connection: ClientConnection) -> None:
        """A connection is gone."""
        self._connections.discard(connection)

    def cut(self, failure: Failure, why: str) -> None:
        """Cut all of them off for good, and those that are being made.

        An answer that is being read fails with `failure`, a request that was not sent as refused.
        """
        self.cut_off = why
        for connection in list(self._connections):
            connection.cut(failure, why)
