"""Reaching a store node: a connected stream socket, by a deadline. Knows no protocol."""

import socket

from kvrouter_store import _core
from kvrouter_store.connection.address import Address
from kvrouter_store.connection.deadline import Deadline
from kvrouter_store.errors import StoreUnavailable

__all__ = ["dial"]


def dial(address: Address, deadline: Deadline) -> socket.socket:
    """A blocking socket, the caller's to close. Raises StoreUnavailable."""
    try:
        if address.path:
            link = _dial_unix(address.path, deadline)
        else:
            target = (address.host, address.port)
            link = socket.create_connection(target, timeout=deadline.left_s())
            _core.tune_tcp(link.fileno())
    except OSError as error:
        raise StoreUnavailable(f"no connection to the store at {address}: {error}") from error
    link.settimeout(None)
    return link


def _dial_unix(path: str, deadline: Deadline) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        link.settimeout(deadline.left_s())
        link.connect(path)
    except BaseException:
        link.close()
        raise
    return link
