"""TLS contexts from files: what the router's ports show, and whom it trusts among engines.

The standard library's OpenSSL; certificates are read when a context is made, never later.
"""

from __future__ import annotations

import ssl
import stat
from functools import cached_property
from pathlib import Path


def server_context(certificate: str, key: str, clients: str) -> ssl.SSLContext:
    """What a port shows.

    Args:
        certificate: PEM file of the certificate and its chain; of the key too where `key` is "".
        key: PEM file of its key, without a passphrase.
        clients: PEM file of the CAs of which clients must show a certificate; "": of none.

    Raises:
        ValueError: a file cannot be used; says which in a sentence.
    """
    _check_key(key or certificate)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key or None, password=_no_passphrase)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        named = f"{certificate} and {key}" if key else certificate
        raise ValueError(f"{named}: {_reason(error)}; give a certificate and its key") from None
    if clients:
        _trust(context, clients)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(authorities: str) -> ssl.SSLContext:
    """Whom the router trusts where it connects, whose certificate must name the host.

    Args:
        authorities: PEM file of CAs; "": those that this machine trusts.

    Raises:
        ValueError: the file cannot be used.
    """
    context = ssl.create_default_context() if not authorities else _trusting_nobody()
    context.set_alpn_protocols(["http/1.1"])
    if authorities:
        _trust(context, authorities)
    return context


class Trust:
    """Whom to trust among engines; nothing is read before one is reached by HTTPS.

    Args:
        authorities: see `client_context`.
    """

    def __init__(self, authorities: str = "") -> None:
        self._authorities = authorities

    @cached_property
    def context(self) -> ssl.SSLContext:
        """For all connections; raises ValueError where the file cannot be used any more."""
        return client_context(self._authorities)


def _trusting_nobody() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks names and certificates
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _trust(context: ssl.SSLContext, path: str) -> None:
    try:
        context.load_verify_locations(cafile=path)
    except OSError as error:
        raise ValueError(f"{path}: {_reason(error)}; give a PEM file of CAs") from None


def _check_key(path: str) -> None:
    """Refuse a key that others can read; its group may, as in the store."""
    try:
        mode = Path(path).stat().st_mode
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give a PEM file") from None
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise ValueError(f"{path} can be read by others: chmod 600 {path}")


def _no_passphrase() -> str:
    raise ValueError("its key has a passphrase")


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None)
    return str(reason or error).replace("_", " ").lower()
