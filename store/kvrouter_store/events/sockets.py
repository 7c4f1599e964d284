"""ZMQ sockets on the running loop, whose messages go to callbacks, and take turns with the rest."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final

import zmq

MAX_MESSAGE_BYTES: Final = 8 << 20
"""A step that stores a prompt of a million tokens takes 7.5 MB."""
SENT_MESSAGES: Final = 100_000
"""That wait to be sent: vLLM's own bound; ZMQ's default drops beyond 1,000."""
RECEIVED_MESSAGES: Final = 32
"""Of each connection, that wait to be taken: what is more waits in the kernel and at its sender."""
REST_S: Final = 0.005
"""Between two turns. Messages that come meanwhile are taken together: engines send one per step."""
TURN_S: Final = 0.003
"""After so long other callbacks of the loop run."""
_READABLE: Final = int(zmq.POLLIN)
"""An enumeration's `&` takes as long as the question itself."""

log = logging.getLogger(__name__)


def endpoint_of(host: str, port: int) -> str:
    """A TCP endpoint of ZMQ; an IPv6 address gets its brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class Turns:
    """Shares the loop between inboxes: each takes one message in turn, for TURN_S at a time.

    So at most a third of the loop's time goes to messages, however many come. `work` does a part of
    what messages left to do, and returns whether there is more: then no message is taken.
    """

    def __init__(self, work: Callable[[], bool] = lambda: False) -> None:
        self._work = work
        self._waiting: deque[Inbox] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, inbox: "Inbox") -> None:
        """A message may have come for `inbox`."""
        self._waiting.append(inbox)
        self.wake()

    def wake(self) -> None:
        """There is something to do."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(REST_S, self._run)

    def _run(self) -> None:
        until = monotonic() + TURN_S
        more = True
        while more and monotonic() < until:
            more = self._work()
            if not more and self._waiting:
                inbox, more = self._waiting.popleft(), True
                if inbox.take_one():
                    self._waiting.append(inbox)
        self._timer = None
        if more:
            self.wake()


class Inbox:
    """Passes a socket's messages to `take`, whose exceptions are logged. It owns the socket."""

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        take: Callable[[Sequence[bytes]], None],
        turns: Turns | None = None,
    ) -> None:
        self.socket = socket
        self._take = take
        self._turns = turns or Turns()
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._fd: int = socket.FD
        self._turns.add(self)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)
            self.socket.close(linger=0)

    def take_one(self) -> bool:
        """Take a message; returns whether there may be more.

        Only after the last is ZMQ's descriptor quiet, and waited for.
        """
        if self._closed:
            return False
        if not int(self.socket.getsockopt(zmq.EVENTS)) & _READABLE:
            self._loop.add_reader(self._fd, self._wake)
            return False
        frames = self.socket.recv_multipart(zmq.NOBLOCK)
        try:
            self._take(frames)
        except Exception:  # to stop here would leave queued messages until the next one comes
            log.exception("KV events: a message could not be applied")
        return True

    def _wake(self) -> None:
        """A message came: take it soon, with those that come until then."""
        self._loop.remove_reader(self._fd)
        self._turns.add(self)


def open_context() -> "zmq.Context[zmq.Socket[bytes]]":
    """A context for as many sockets as ZMQ allows: its default is enough for 255 publishers."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, int(context.get(zmq.SOCKET_LIMIT)))
    return context


def open_socket(
    context: "zmq.Context[zmq.Socket[bytes]]", kind: int, endpoint: str
) -> "zmq.Socket[bytes]":
    """A socket of a ZMQ kind with our bounds, to be bound or connected to `endpoint`."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.IPV6, "[" in endpoint)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, RECEIVED_MESSAGES)
    socket.setsockopt(zmq.SNDHWM, SENT_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)  # as kvrouter_store.connection.keep_alive
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    return socket


def subscriber(
    context: "zmq.Context[zmq.Socket[bytes]]", prefix: bytes, endpoint: str
) -> "zmq.Socket[bytes]":
    """A SUB socket for topics that begin with `prefix`."""
    socket = open_socket(context, zmq.SUB, endpoint)
    socket.setsockopt(zmq.SUBSCRIBE, prefix)
    return socket
