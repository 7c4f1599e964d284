"""Who may call one router, put together from its settings and changed by them while it runs."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvrouter.access.caller import KeyRing
from kvrouter.access.gate import Gate
from kvrouter.access.tls import Trust
from kvrouter.access.worker_keys import WorkerKeys
from kvrouter.flags import UsageError
from kvstore.safety import is_loopback

if TYPE_CHECKING:
    from kvrouter.http.server import Handler, HttpServer
    from kvrouter.log import RequestLog
    from kvrouter.metrics import Metrics
    from kvrouter.settings.access import AccessSettings

log = logging.getLogger(__name__)


class Access:
    """Keys of callers and of engines.

    Args:
        settings: read now, and again by `follow`.

    Raises:
        UsageError: a file changed since the settings were read and cannot be used.

    Attributes:
        ring: the callers.
        worker_keys: what engines are shown.
        trust: whom to trust among them.
    """

    def __init__(self, settings: AccessSettings) -> None:
        self.ring = KeyRing()
        self.worker_keys = WorkerKeys()
        self.trust = Trust(settings.engine_ca_file)
        self._gate: Gate | None = None
        try:
            self._set(settings)
        except ValueError as error:
            raise UsageError(str(error)) from None

    @property
    def asks(self) -> bool:
        """Whether callers must bring a key."""
        return len(self.ring) > 0

    def gate(self, handler: Handler, metrics: Metrics, lines: RequestLog | None) -> Gate:
        """The gate before `handler`, with its metrics exposed."""
        gate = self._gate = Gate(self.ring, handler, metrics, lines)
        for reading in gate.readings():
            metrics.add(reading)
        return gate

    def advise(self, host: str, *, plain: bool) -> None:
        """Warn, once at the start, where keys would travel to other hosts as they are."""
        if plain and self.asks and not is_loopback(host):
            log.warning(
                "keys travel in the clear to %s: give --ssl-certfile and --ssl-keyfile, or keep "
                "the wire to a network that you trust with them",
                host,
            )

    def follow(self, settings: AccessSettings, server: HttpServer | None) -> None:
        """Take the keys over as they stand now; where they cannot be used, all stays as it is.

        Requests under way go on, also those of a key that is gone.
        """
        try:
            if self.asks and not settings.caller_keys():
                raise ValueError("that nobody is asked for a key any more takes a restart")
            self._set(settings)
        except ValueError as error:
            log.error("SIGHUP: keys stay as they are: %s", error)
        if server is not None and self._gate is not None:
            server.handler = self._gate.handler

    def _set(self, settings: AccessSettings) -> None:
        callers, engines = settings.caller_keys(), settings.engine_keys()
        self.ring.follow(callers)
        self.worker_keys.follow(engines)
        self.worker_keys.alone = self.asks
        if callers:
            log.info("callers need a key: %d names", len(callers))
