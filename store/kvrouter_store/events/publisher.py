"""The sockets of a publisher of KV events, in the protocol of vLLM (`ZmqEventPublisher`).

A message is topic, number (8 bytes, big-endian) and payload. A request for a replay is an empty
frame and the first number that is wanted; the last answer has the number -1.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from kvrouter_store.events.sockets import QUEUED_MESSAGES, Inbox

END = (-1).to_bytes(8, "big", signed=True)
Message = list[bytes]


def _unheard(start: bytes) -> None:
    """Nobody wants to know of replays."""


@dataclass(eq=False)
class EventSockets:
    """Sends messages and repeats those `kept`. Never blocks; ZMQ drops what nobody subscribes to.

    zmq.ZMQError: an endpoint cannot be used. For one thread at a time.
    """

    endpoint: str  # of messages
    replay_endpoint: str | None = None  # of replays; None: there are none
    buffer_steps: int = 10_000  # messages that can be repeated
    bind: bool = True  # False: `endpoint` is a subscriber's, to connect to
    on_replay: Callable[[bytes], None] = _unheard  # called with the first number that is wanted

    def __post_init__(self) -> None:
        self.kept: deque[Message] = deque(maxlen=self.buffer_steps)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, QUEUED_MESSAGES)
        self._router = self._context.socket(zmq.ROUTER)
        self._inbox: Inbox | None = None
        try:
            (self._socket.bind if self.bind else self._socket.connect)(self.endpoint)
            if self.replay_endpoint is not None:
                self._router.bind(self.replay_endpoint)
        except zmq.ZMQError:
            self.close()
            raise

    @property
    def ports(self) -> tuple[int, int | None]:
        """The port of the messages, and that of the replays, if bound."""
        return _port(self._socket), None if self.replay_endpoint is None else _port(self._router)

    def send(self, message: Message) -> None:
        """Send it to whoever subscribes now."""
        self._socket.send_multipart(message, zmq.NOBLOCK)

    def answer_replays(self) -> None:
        """Answer requests on the running loop until `close`, which then belongs to its thread."""
        self._inbox = Inbox(self._router, self._replay)

    def close(self) -> None:
        """Close the sockets and their thread; drops what is not sent. Idempotent."""
        if self._inbox is not None:
            self._inbox.close()
        self._context.destroy(linger=0)

    def _replay(self, frames: Sequence[bytes]) -> None:
        """Answer like vLLM's `ZmqEventPublisher._service_replay`."""
        if len(frames) != 3:
            return
        client, _, start = frames
        self.on_replay(start)
        for topic, number, payload in self.kept:
            if number >= start:
                self._answer(client, topic, number, payload)
        self._answer(client, b"", END, b"")

    def _answer(self, client: bytes, *frames: bytes) -> None:
        self._router.send_multipart([client, b"", *frames], zmq.NOBLOCK)


def _port(socket: "zmq.Socket[bytes]") -> int:
    return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
