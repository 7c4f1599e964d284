"""A ZMQ socket on the running loop, whose messages go to a callback."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

import zmq

MAX_MESSAGE_BYTES: Final = 64 << 20
QUEUED_MESSAGES: Final = 100_000
"""vLLM's own bound; ZMQ's default drops beyond 1,000."""
GATHER_S: Final = 0.005
"""Messages that come within this time are taken together: engines send one per step."""
MESSAGES_PER_TURN: Final = 64
"""Messages taken before other callbacks of the loop run."""

log = logging.getLogger(__name__)


def endpoint_of(host: str, port: int) -> str:
    """A TCP endpoint of ZMQ; an IPv6 address gets its brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class Inbox:
    """Passes a socket's messages to `take`, whose exceptions are logged. It owns the socket."""

    def __init__(
        self, socket: "zmq.Socket[bytes]", take: Callable[[Sequence[bytes]], None]
    ) -> None:
        self.socket = socket
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._fd: int = socket.FD
        self._timer: asyncio.TimerHandle | None = None
        self._drain()

    def close(self) -> None:
        """Close the socket. Idempotent."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)
            if self._timer is not None:
                self._timer.cancel()
            self.socket.close(linger=0)

    def _wake(self) -> None:
        """A message came: take it soon, with those that come until then."""
        self._loop.remove_reader(self._fd)
        self._timer = self._loop.call_later(GATHER_S, self._drain)

    def _drain(self) -> None:
        """Take messages until none is left: only then is ZMQ's descriptor quiet."""
        for _ in range(MESSAGES_PER_TURN):
            if self._closed:
                return
            if not int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._loop.add_reader(self._fd, self._wake)
                return
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
            try:
                self._take(frames)
            except Exception:  # to stop here would leave queued messages until the next one comes
                log.exception("KV events: a message could not be applied")
        self._timer = self._loop.call_later(0, self._drain)


def open_context() -> "zmq.Context[zmq.Socket[bytes]]":
    """A context for as many sockets as ZMQ allows: its default is enough for 255 publishers."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, int(context.get(zmq.SOCKET_LIMIT)))
    return context


def open_socket(context: "zmq.Context[zmq.Socket[bytes]]", kind: int) -> "zmq.Socket[bytes]":
    """A socket of a ZMQ kind with our bounds."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, QUEUED_MESSAGES)
    socket.setsockopt(zmq.SNDHWM, QUEUED_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)  # as kvrouter_store.connection.keep_alive
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    return socket


def subscriber(context: "zmq.Context[zmq.Socket[bytes]]", prefix: bytes) -> "zmq.Socket[bytes]":
    """A SUB socket for topics that begin with `prefix`."""
    socket = open_socket(context, zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, prefix)
    return socket
