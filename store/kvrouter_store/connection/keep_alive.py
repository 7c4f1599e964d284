"""TCP keep-alive: no NAT forgets a silent connection, and a dead peer is noticed."""

import socket
from typing import Final, Protocol

IDLE_S: Final = 30
"""Of silence before the kernel asks the peer for a sign of life."""
INTERVAL_S: Final = 10
"""Between two questions."""
PROBES: Final = 3
"""Questions without an answer after which the connection breaks."""


class Tunable(Protocol):
    """A socket, or an event loop's view of one."""

    def setsockopt(self, level: int, name: int, value: int, /) -> object:
        """As `socket.socket.setsockopt`."""


def keep_alive(sock: Tunable) -> None:
    """Turn keep-alive on. What a listening TCP socket accepts from then on has it too.

    The native ends of the store's connections have the same times (csrc/base/tcp_options.cpp).
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
