"""Who may call one router, put together from its settings and changed by them while it runs."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvrouter.access.callers import KeyRing
from kvrouter.access.gate import Gate
from kvrouter.credentials.engine_keys import WorkerKeys
from kvrouter.credentials.tls import Trust
from kvrouter.options.complaints import UsageError
from kvrouter_store.node.start_checks import is_loopback

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvrouter.access.settings import AccessSettings
    from kvrouter.credentials.caller_keys import Key
    from kvrouter.http.server.listener import Handler
    from kvrouter.telemetry.metrics import Metrics
    from kvrouter.telemetry.request_log import RequestLog

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AccessKeys:
    """All keys, as they were read.

    Attributes:
        callers: keys that callers may bring.
        engines: keys that engines are shown, by `HOST:PORT`; under "" that of all others.
    """

    callers: list[Key]
    engines: Mapping[str, str]

    @classmethod
    def read(cls, settings: AccessSettings) -> AccessKeys:
        """Read the files; a file of many keys takes seconds.

        Raises:
            ValueError: a file cannot be used; a sentence that repeats no key.
        """
        return cls(settings.caller_keys(), settings.engine_keys())


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
        try:
            self._set(AccessKeys.read(settings))
        except ValueError as error:
            raise UsageError(str(error)) from None

    @property
    def asks(self) -> bool:
        """Whether callers must bring a key."""
        return len(self.ring) > 0

    def gate(self, handler: Handler, metrics: Metrics, lines: RequestLog | None) -> Gate:
        """The gate before `handler`, with its metrics exposed."""
        gate = Gate(self.ring, handler, metrics, lines)
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

    def follow(self, settings: AccessSettings, keys: AccessKeys | None = None) -> None:
        """Take the keys over; where they cannot be used, all stays as it is.

        Requests under way go on, also those of a key that is gone.

        Args:
            settings: that say where the keys are.
            keys: of `settings`; None: they are read now.
        """
        try:
            keys = keys or AccessKeys.read(settings)
            if self.asks and not keys.callers:
                raise ValueError("that nobody is asked for a key any more takes a restart")
            self._set(keys)
        except ValueError as error:
            log.error("SIGHUP: keys stay as they are: %s", error)

    def _set(self, keys: AccessKeys) -> None:
        self.ring.follow(keys.callers)
        self.worker_keys.follow(keys.engines)
        self.worker_keys.alone = self.asks
        if keys.callers:
            log.info("callers need a key: %d names", len(keys.callers))
