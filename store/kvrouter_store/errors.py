"""What the store's clients raise, and why the system refused. Nothing here does I/O.

KVStoreError
 +- StoreUnavailable     no answer: the server is away, the link was cut, or the deadline passed
 |   +- DeadlineExceeded   the server is there, but did not answer in time
 |   +- Untrusted          TLS failed: a certificate is wrong, or one end does not speak TLS
 +- StoreRefused         the server answered, and said no
 |   +- Unauthorized       the server asks for a token, and was shown none of its
 |   +- UnknownManifest    the manifest was never registered with this server
 +- CorruptBlock         the bytes of a block do not match their digest
 +- LeaseLost            a lease or reservation is not held any more
 +- BadDocument          a cache spec or manifest that does not say what it must
 +- StoreClosed          the client (or a lease of it) was used after close()
"""

import os
import socket
import ssl

__all__ = [
    "BadDocument",
    "CorruptBlock",
    "DeadlineExceeded",
    "KVStoreError",
    "LeaseLost",
    "StoreClosed",
    "StoreRefused",
    "StoreUnavailable",
    "Unauthorized",
    "UnknownManifest",
    "Untrusted",
    "cannot_listen",
    "reason_of",
]


class KVStoreError(Exception):
    """Anything that the store's client reports."""


class StoreUnavailable(KVStoreError):
    """No answer came: recompute, or try again later. Nothing is known of the operation's effect."""


class DeadlineExceeded(StoreUnavailable):
    """The operation's deadline passed before the answer came. Its connection was given up."""


class Untrusted(StoreUnavailable):
    """TLS with the server failed: a certificate is not what it must be, or one end is plain."""


class StoreRefused(KVStoreError):
    """The server understood the request and refused it; asking again changes nothing."""

    def __init__(self, message: str, status: str = "") -> None:
        super().__init__(message)
        self.status = status


class Unauthorized(StoreRefused):
    """The server serves only clients with a token, and this one has none of its."""


class UnknownManifest(StoreRefused):
    """The manifest is not registered with this server (perhaps it restarted)."""


class CorruptBlock(KVStoreError):
    """The bytes of a block do not match their digest: compute the block again."""


class LeaseLost(KVStoreError):
    """A lease or reservation was given back, or its connection was lost."""


class BadDocument(KVStoreError):
    """A cache spec, layout or manifest is malformed."""


class StoreClosed(KVStoreError):
    """The client was closed."""


def reason_of(error: OSError) -> str:
    """Why the system refused, without the numbers and addresses that libraries add."""
    if isinstance(error, ssl.SSLError):
        return str(error.reason or error.strerror).replace("_", " ").lower()
    if isinstance(error, socket.gaierror) or error.errno is None:
        return error.strerror or str(error)
    return os.strerror(error.errno)


def cannot_listen(host: str, port: int, error: OSError) -> OSError:
    """The same error, with a sentence that names the address."""
    return OSError(error.errno, f"cannot listen on {host}:{port}: {reason_of(error)}")
