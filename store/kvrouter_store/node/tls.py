"""TLS of a store node: the files it is started with."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import TYPE_CHECKING

from kvrouter_store._core import TlsContext
from kvrouter_store.node.start_checks import StartRefused, is_loopback

if TYPE_CHECKING:
    import ssl

    from kvrouter_store.node.settings import StoreSettings


def tls_of(settings: StoreSettings) -> TlsContext | None:
    """The context for clients over TCP; None where the node is to be plain.

    Raises StartRefused where a file cannot be used, a key can be read by others, or libssl is
    missing.
    """
    cert, key, ca = settings.tls_cert_file, settings.tls_key_file, settings.tls_ca_file
    if not (cert or key or ca):
        return None
    if not (cert and key):
        raise StartRefused("TLS needs both: give --tls-cert-file FILE and --tls-key-file FILE")
    _check_key(Path(key))
    try:
        return TlsContext.server(cert_file=cert, key_file=key, ca_file=ca)
    except ValueError as error:
        raise StartRefused(str(error)) from None


def https_of(settings: StoreSettings) -> ssl.SSLContext | None:
    """The context of the HTTP side, of the same files; None where the node is to be plain.

    OSError where a file cannot be used: call `tls_of` first, which says so in a sentence.
    """
    if not settings.tls_cert_file:
        return None
    import ssl  # noqa: PLC0415 (some Pythons have none)

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(settings.tls_cert_file, settings.tls_key_file)
    return context


def _check_key(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise StartRefused(f"--tls-key-file {path}: {error.strerror}; name a PEM file") from None
    # The group may read, as in the file of tokens.
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise StartRefused(f"--tls-key-file {path} can be read by others: chmod 600 {path}")


def plain_wire_warning(settings: StoreSettings) -> str | None:
    """A sentence for a node that serves other hosts with tokens and without TLS."""
    if settings.tls_cert_file or not settings.token_file or is_loopback(settings.host):
        return None
    return (
        f"tokens and KV travel in the clear to and from {settings.host}: give --tls-cert-file and "
        "--tls-key-file, or keep the wire to a network that you trust with them"
    )
