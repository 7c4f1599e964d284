"""Why the operating system refused, in words for logs and terminals.

Beside `errors`, because clients of the store work with a Python that has no ssl.
"""

import os
import socket
import ssl


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
