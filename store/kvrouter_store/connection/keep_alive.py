"""TCP keep-alive: no NAT forgets a silent connection, and a dead peer is noticed."""

import socket
from typing import Protocol


class Tunable(Protocol):
    """A socket, or an event loop's view of one."""

    def setsockopt(self, level: int, name: int, value: int, /) -> object:
        """As `socket.socket.setsockopt`."""


def keep_alive(sock: Tunable) -> None:
    """Have the kernel ask the peer after 30 s of silence, and give up after 3 questions in 30 s.

    What a listening TCP socket accepts from then on has it too. The same times are in
    csrc/base/tcp_options.cpp and kvrouter_store.events.sockets.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
