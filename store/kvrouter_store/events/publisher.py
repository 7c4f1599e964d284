"""The sockets of a publisher of KV events, in the protocol of vLLM (`ZmqEventPublisher`).

A message is topic, number (8 bytes, big-endian) and payload. A request for a replay is an empty
frame and the first number that is wanted; the last answer has the number -1.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import zmq

from kvrouter_store.events.sockets import Inbox, open_socket

COUNT_BITS: Final = 40
"""The lower bits of a message's number count the messages of its publisher from 0. The upper ones
distinguish publishers before and after a restart, where these do so: 0 with vLLM."""
MAX_ASKED_BYTES: Final = 1024
"""Of a subscription or a request: what strangers send waits in memory."""
MAX_ASKED: Final = 256
"""Of one peer, at a time."""
END = [b"", (-1).to_bytes(8, "big", signed=True), b""]


@dataclass(eq=False)
class EventSockets:
    """Sends messages and repeats those `kept`. Never blocks; ZMQ drops what nobody subscribes to.

    zmq.ZMQError: an endpoint cannot be used. For the running loop.
    """

    endpoint: str  # of messages
    replay_endpoint: str | None = None  # of replays; None: there are none
    buffer_steps: int = 10_000  # messages that can be repeated
    bind: bool = True  # False: `endpoint` is a subscriber's, to connect to
    on_replay: Callable[[bytes], None] = lambda start: None  # the first number that is wanted

    def __post_init__(self) -> None:
        self.kept: deque[list[bytes]] = deque(maxlen=self.buffer_steps)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = _told_little(open_socket(self._context, zmq.PUB, self.endpoint))
        self._subscriptions: Inbox | None = None
        self._replays: Inbox | None = None
        try:
            (self._socket.bind if self.bind else self._socket.connect)(self.endpoint)
            # Only who takes what peers send notices that they have left.
            self._subscriptions = Inbox(self._socket, lambda _: None)
            if self.replay_endpoint is not None:
                replays = open_socket(self._context, zmq.ROUTER, self.replay_endpoint)
                router = _told_little(replays)
                router.bind(self.replay_endpoint)
                self._replays = Inbox(router, partial(self._replay, router))
        except zmq.ZMQError:
            self.close()
            raise

    @property
    def ports(self) -> tuple[int, int | None]:
        """The port of the messages, and that of the replays, if bound."""
        return _port(self._socket), _port(self._replays.socket) if self._replays else None

    def send(self, message: list[bytes]) -> None:
        """Send it to whoever subscribes now."""
        self._socket.send_multipart(message, zmq.NOBLOCK)

    def close(self) -> None:
        """Close the sockets and their thread; drops what is not sent. Idempotent."""
        for inbox in filter(None, (self._subscriptions, self._replays)):
            inbox.close()
        self._context.destroy(linger=0)

    def _replay(self, router: "zmq.Socket[bytes]", frames: Sequence[bytes]) -> None:
        """Answer like vLLM's `ZmqEventPublisher._service_replay`."""
        if len(frames) != 3:
            return
        client, _, start = frames
        self.on_replay(start)
        wanted = [message for message in self.kept if message[1] >= start]
        for message in [*wanted, END]:
            router.send_multipart([client, b"", *message], zmq.NOBLOCK)


def _told_little(socket: "zmq.Socket[bytes]") -> "zmq.Socket[bytes]":
    """With bounds for subscriptions and requests, which wait in memory until they are taken.

    A domain of ZAP, which nobody handles here, refuses ZMTP 1.0: to it, any bytes are messages, and
    those of peers with the same name are never taken.
    """
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_ASKED_BYTES)
    socket.setsockopt(zmq.RCVHWM, MAX_ASKED)
    socket.setsockopt(zmq.ZAP_DOMAIN, b"kvrouter")
    return socket


def _port(socket: "zmq.Socket[bytes]") -> int:
    return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
