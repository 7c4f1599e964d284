"""What a node does on signals: SIGTERM and SIGINT let it drain and leave, SIGHUP reloads files."""

import asyncio
import logging
import signal
import ssl
import time

from kvrouter_store._core import StoreServer
from kvrouter_store.node.settings import StoreSettings
from kvrouter_store.node.start_checks import StartRefused, tls_of, tokens_of

log = logging.getLogger(__name__)


class Signals:
    """SIGTERM and SIGINT of this process as two events. Needs the running loop."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        """The first signal, once it has come."""
        self.leave = asyncio.Event()
        """Set by the first signal."""
        self.at_once = asyncio.Event()
        """Set by the second."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._arrived, number)

    def _arrived(self, number: signal.Signals) -> None:
        if self.first is None:
            self.first = number
            self.leave.set()
        else:
            self.at_once.set()


async def drain(server: StoreServer, timeout_s: float, at_once: asyncio.Event) -> None:
    """Let requests in flight end, for at most `timeout_s` seconds or until `at_once`."""
    loop, started = asyncio.get_running_loop(), time.monotonic()
    done = asyncio.Event()
    gone = server.drain()
    loop.add_reader(gone, done.set)
    ends = [asyncio.create_task(event.wait()) for event in (done, at_once)]
    try:
        log.info("draining: no connection is accepted any more")
        await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        loop.remove_reader(gone)
        for end in ends:
            end.cancel()
    if done.is_set():
        log.info("drained in %.3f s", time.monotonic() - started)
        return
    held = server.stats()
    log.warning(
        "leaving %d connections with %d leases and %d blocks being written, %s",
        held["connections"],
        held["leases"],
        held["reserved_blocks"],
        "at the second signal" if at_once.is_set() else f"after --drain-timeout {timeout_s:g}",
    )


def reload_on_hangup(
    settings: StoreSettings, server: StoreServer, https: ssl.SSLContext | None
) -> None:
    """From now on SIGHUP reloads tokens and certificate. Needs the running loop."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _reload, settings, server, https)


def _reload(settings: StoreSettings, server: StoreServer, https: ssl.SSLContext | None) -> None:
    """Read the files again. A file that cannot be used is logged, and changes nothing."""
    if settings.token_file:
        _reload_tokens(settings, server)
    if settings.tls_cert_file:
        _reload_certificate(settings, server, https)
    if not (settings.token_file or settings.tls_cert_file):
        log.info("SIGHUP: there is nothing to read again")


def _reload_tokens(settings: StoreSettings, server: StoreServer) -> None:
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


def _reload_certificate(
    settings: StoreSettings, server: StoreServer, https: ssl.SSLContext | None
) -> None:
    try:
        tls = tls_of(settings)
        if tls is not None:
            server.follow_tls(tls)
        if https is not None:
            https.load_cert_chain(settings.tls_cert_file, settings.tls_key_file)
    except (StartRefused, OSError) as error:
        log.error("SIGHUP: certificates stay as they are: %s", error)
    else:
        log.info("SIGHUP: certificates were read again")
