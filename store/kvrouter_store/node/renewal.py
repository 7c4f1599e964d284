"""What SIGHUP reads anew while a node serves: the tenants' tokens, and the certificate."""

import asyncio
import logging
import signal
import ssl

from hypercorn.config import Config

from kvrouter_store._core import StoreServer
from kvrouter_store.node.settings import StoreSettings
from kvrouter_store.node.start_checks import StartRefused, tokens_of
from kvrouter_store.node.tls import tls_of

__all__ = ["HttpConfig", "on_hangup", "renew"]

log = logging.getLogger(__name__)


class HttpConfig(Config):
    """Hypercorn's settings, with what HTTPS shows: read once, and again when that is asked for."""

    shown: ssl.SSLContext | None = None

    def create_ssl_context(self) -> ssl.SSLContext | None:
        """The same each time."""
        if self.shown is None:
            self.shown = super().create_ssl_context()
        return self.shown


def on_hangup(settings: StoreSettings, server: StoreServer, http: HttpConfig) -> None:
    """From now on SIGHUP renews. Needs the running loop."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, renew, settings, server, http)


def renew(settings: StoreSettings, server: StoreServer, http: HttpConfig) -> None:
    """Read the files again. What cannot be used is said, and stays as it was."""
    if settings.token_file:
        _tokens(settings, server)
    if settings.tls_cert_file:
        _certificate(settings, server, http)
    if not (settings.token_file or settings.tls_cert_file):
        log.info("SIGHUP: there is nothing to read again")


def _tokens(settings: StoreSettings, server: StoreServer) -> None:
    try:
        ended = server.follow_tokens(tokens_of(settings))
    except StartRefused as error:
        log.error("SIGHUP: tokens stay as they are: %s", error)
    except ValueError:
        log.error(
            "SIGHUP: tokens stay as they are: --token-file %s names other tenants than at the "
            "start, which takes a restart",
            settings.token_file,
        )
    else:
        log.info("SIGHUP: tokens were read again; connections that had another: %d, ended", ended)


def _certificate(settings: StoreSettings, server: StoreServer, http: HttpConfig) -> None:
    try:
        tls = tls_of(settings)
        if tls is not None:
            server.follow_tls(tls)
        if http.shown is not None:
            http.shown.load_cert_chain(settings.tls_cert_file, settings.tls_key_file)
    except (StartRefused, OSError) as error:
        log.error("SIGHUP: certificates stay as they are: %s", error)
    else:
        log.info("SIGHUP: certificates were read again")
