"""TLS contexts from files: for the router's ports, and for its connections to engines.

Certificates are read when a context is made, never later.
"""

from __future__ import annotations

import os
import ssl
import stat
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from kvrouter_store.system_errors import reason_of

_MOST_BYTES: Final = 1 << 20  # of a certificate and its chain


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


def client_context(authorities: str, pem: bytes = b"") -> ssl.SSLContext:
    """The TLS of connections to engines, whose certificates must name the host.

    `authorities` is a PEM file of CAs, or `pem` has its text; neither: those that this machine
    trusts. ValueError: they cannot be used.
    """
    if authorities or pem:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks names and certificates
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        _trust(context, authorities, pem)
    else:
        context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def show_certificate(context: ssl.SSLContext, pem: bytes) -> None:
    """Let clients of `context` show the certificate of `pem`, which holds its key too.

    OpenSSL takes both from files only: this one is in memory, and gone afterwards. ValueError: they
    cannot be used.
    """
    with open(os.memfd_create("certificate"), "wb") as file:
        file.write(pem)
        file.flush()
        try:
            path = f"/proc/self/fd/{file.fileno()}"
            context.load_cert_chain(path, password=_no_passphrase)
        except OSError as error:  # ssl.SSLError is one
            raise ValueError(f"{reason_of(error)}; give a certificate and its key") from None


def read_certificate(certificate: str, key: str) -> bytes:
    """The text of a certificate that clients show and of its key, as `show_certificate` takes it.

    Args:
        certificate: PEM file of the certificate and its chain; of the key too if `key` is "".
        key: PEM file of its key, without a passphrase.

    Raises:
        ValueError: a file cannot be used; a sentence that names it.
    """
    _check_key(key or certificate)
    try:
        pem = b"\n".join(_text(path) for path in (certificate, key) if path)
        show_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), pem)
    except OSError as error:
        raise ValueError(f"{certificate}: {reason_of(error)}; give a PEM file") from None
    except ValueError as error:
        raise ValueError(f"{' and '.join(filter(None, (certificate, key)))}: {error}") from None
    return pem


@dataclass(eq=False, repr=False)
class Trust:
    """The TLS of connections to engines, made when the first engine is reached by HTTPS."""

    authorities: str = ""  # PEM file of CAs; "": those that this machine trusts
    certificate: bytes = b""  # for engines that ask for one, with its key; b"": none

    @cached_property
    def context(self) -> ssl.SSLContext:
        """For all connections; raises ValueError if the file cannot be used any more."""
        context = client_context(self.authorities)
        if self.certificate:
            show_certificate(context, self.certificate)
        return context

    def renew(self, certificate: bytes) -> None:
        """Show this certificate from now on, on new connections. ValueError: there is none."""
        if self.certificate and not certificate:
            raise ValueError("restart the router to show engines no certificate any more")
        if certificate != self.certificate:
            self.certificate = certificate
            if "context" in self.__dict__:
                show_certificate(self.context, certificate)


def _text(path: str) -> bytes:
    with Path(path).open("rb") as file:
        return file.read(_MOST_BYTES)


def _trust(context: ssl.SSLContext, path: str, pem: bytes = b"") -> None:
    text = pem.decode("ascii", "ignore") if pem else None  # its comments may be of any letters
    try:
        context.load_verify_locations(cafile=path or None, cadata=text)
    except (OSError, ValueError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else error
        raise ValueError(f"{path or 'its CA'}: {reason}; give a PEM file of CAs") from None


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
