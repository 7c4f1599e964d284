"""TLS contexts from files: for the router's ports, and for its connections to engines.

Certificates are read when a context is made, never later.
"""

from __future__ import annotations

import ssl
import stat
from functools import cached_property
from pathlib import Path

from kvrouter_store.system_errors import reason_of


def server_context(certificate: str, key: str, clients: str) -> ssl.SSLContext:
    """The TLS of a port.

    Args:
        certificate: PEM file of the certificate and its chain; of the key too if `key` is "".
        key: PEM file of its key, without a passphrase.
        clients: PEM file of CAs; clients must show a certificate of one of them. "": no CAs.

    Raises:
        ValueError: a file cannot be used; a sentence that names it.
    """
    _check_key(key or certificate)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key or None, password=_no_passphrase)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        named = f"{certificate} and {key}" if key else certificate
        why = reason_of(error) if isinstance(error, OSError) else error
        raise ValueError(f"{named}: {why}; give a certificate and its key") from None
    if clients:
        _trust(context, clients)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(authorities: str) -> ssl.SSLContext:
    """The TLS of connections to engines, whose certificates must name the host.

    `authorities` is a PEM file of CAs; "": those that this machine trusts. ValueError: the file
    cannot be used.
    """
    if authorities:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks names and certificates
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        _trust(context, authorities)
    else:
        context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


class Trust:
    """The TLS of connections to engines, made when the first engine is reached by HTTPS."""

    def __init__(self, authorities: str = "") -> None:
        self._authorities = authorities

    @cached_property
    def context(self) -> ssl.SSLContext:
        """For all connections; raises ValueError if the file cannot be used any more."""
        return client_context(self._authorities)


def _trust(context: ssl.SSLContext, path: str) -> None:
    try:
        context.load_verify_locations(cafile=path)
    except OSError as error:
        raise ValueError(f"{path}: {reason_of(error)}; give a PEM file of CAs") from None


def _check_key(path: str) -> None:
    """Refuse a key that other users can read; its group may, as in the store."""
    try:
        mode = Path(path).stat().st_mode
    except OSError as error:
        raise ValueError(f"{path}: {reason_of(error)}; give a PEM file") from None
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise ValueError(f"{path} can be read by others: chmod 600 {path}")


def _no_passphrase() -> str:
    raise ValueError("its key has a passphrase")
