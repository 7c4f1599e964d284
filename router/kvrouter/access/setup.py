"""Keys of callers and engines, and the admin token: from the settings, and changed with them."""

from __future__ import annotations

import hmac
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvrouter.access.callers import KeyRing
from kvrouter.credentials.engine_keys import WorkerKeys
from kvrouter.credentials.tls import Trust
from kvrouter.errors import ApiError
from kvrouter.options.complaints import UsageError
from kvrouter_store.connection.tokens import bearer_token
from kvrouter_store.node.start_checks import is_loopback

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvrouter.access.settings import AccessSettings
    from kvrouter.credentials.caller_keys import Key

log = logging.getLogger(__name__)


@dataclass(slots=True)
class AdminToken:
    """The token that /workers and the status document require, as it is now; "": none."""

    value: str = ""

    def ask(self, headers: Mapping[str, str]) -> None:
        """Check the token of a request, in constant time. ApiError: 401."""
        given = bearer_token(headers.get("authorization", "")).encode("latin-1", "replace")
        if self.value and not hmac.compare_digest(given, self.value.encode()):
            raise ApiError(401, "This needs the admin token, as Authorization: Bearer TOKEN.")


@dataclass(frozen=True, slots=True)
class AccessKeys:
    """Keys of callers, and what the router shows to engines: keys, and a certificate."""

    callers: list[Key]
    engines: Mapping[str, str]  # by `HOST:PORT`; under "" that of all others
    certificate: bytes  # PEM, with its key; b"": none

    @classmethod
    def read(cls, settings: AccessSettings) -> AccessKeys:
        """Read the files, which takes seconds for many keys. ValueError: one cannot be used."""
        return cls(settings.caller_keys(), settings.engine_keys(), settings.engine_certificate())


class Access:
    """The keys in use: those of callers (`ring`) and those for engines.

    UsageError: a file has changed since the settings were checked and cannot be used.
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
        """Whether callers need a key."""
        return len(self.ring) > 0

    def advise(self, host: str, *, plain: bool) -> None:
        """Warn if keys travel to other hosts in the clear."""
        if plain and self.asks and not is_loopback(host):
            log.warning(
                "API keys travel to %s in the clear: give --ssl-certfile and --ssl-keyfile, or use "
                "a network that you trust",
                host,
            )

    def follow(self, settings: AccessSettings, keys: AccessKeys | None = None) -> None:
        """Take over new keys, read now unless given; if they cannot be used, nothing changes.

        Requests in flight go on, even if their key is gone.
        """
        try:
            keys = keys or AccessKeys.read(settings)
            if self.asks and not keys.callers:
                raise ValueError("restart the router to remove the last key of callers")
            self._set(keys)
        except ValueError as error:
            log.error("SIGHUP: the router keeps its keys: %s", error)

    def _set(self, keys: AccessKeys) -> None:
        self.trust.renew(keys.certificate)
        self.ring.follow(keys.callers)
        self.worker_keys.follow(keys.engines)
        self.worker_keys.alone = self.asks
        if keys.callers:
            log.info("callers need a key; there are %d names", len(keys.callers))
