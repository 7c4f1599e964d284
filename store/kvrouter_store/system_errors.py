"""Why the operating system refused, in words for logs and terminals.

Beside `errors`, because clients of the store work with a Python that has no ssl.
"""

import errno
import os
import socket
import ssl

_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})


def is_ours(error: OSError) -> bool:
    """Whether this process or host lacks descriptors, ports or memory: no peer is to blame."""
    if isinstance(error, socket.gaierror):  # it does not say that it could not open a file
        return not _descriptor_left()
    return error.errno in _OURS


def _descriptor_left() -> bool:
    try:
        os.close(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return not is_ours(error)
    return True


def reason_of(error: OSError) -> str:
    """Why the system refused, without the numbers and addresses that libraries add."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate verify failed: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return str(error.reason or error.strerror).replace("_", " ").lower()
    if isinstance(error, socket.gaierror) or error.errno is None:
        return error.strerror or str(error)
    return os.strerror(error.errno)


def cannot_listen(host: str, port: int, error: OSError) -> OSError:
    """The same error, with a sentence that names the address."""
    return OSError(error.errno, f"cannot listen on {host}:{port}: {reason_of(error)}")
