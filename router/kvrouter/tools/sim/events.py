"""KV events as vLLM 0.32 publishes them: three ZMQ frames, the last one msgpack. Never blocks.

Shapes: vllm/distributed/kv_events.py. A block's id is the low 64 bits of its hash. As in vLLM, the
publisher binds only `*`, `::`, ipc and inproc addresses, and connects to others.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import msgspec
import zmq

from kvrouter.prefix.events.sockets import Inbox
from kvrouter.tools.sim.block_cache import Cleared, Event, Removed

_MEDIUM = "GPU"
_END = (-1).to_bytes(8, "big", signed=True)


def _low64(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-8:], "big")


class EventEncoder:
    """Encodes events, with sequence numbers from 0. Has no socket."""

    def __init__(self, block_tokens: int, clock: Callable[[], float] = time.time) -> None:
        self._block_tokens = block_tokens
        self._clock = clock
        self._next = 0
        self._encoder = msgspec.msgpack.Encoder()

    def frames(self, topic: bytes, events: list[Event]) -> list[bytes]:
        """Topic, sequence number (8 bytes, big-endian) and payload of one batch."""
        payload = self._encoder.encode([self._clock(), [self._map(event) for event in events], 0])
        number = self._next.to_bytes(8, "big")
        self._next += 1
        return [topic, number, payload]

    def _map(self, event: Event) -> dict[str, object]:
        if isinstance(event, Cleared):
            return {"type": "AllBlocksCleared"}
        if isinstance(event, Removed):
            return {
                "type": "BlockRemoved",
                "block_hashes": [_low64(block_hash) for block_hash in event.hashes],
                "medium": _MEDIUM,
                "group_idx": 0,
            }
        adapter = event.adapter
        lora = [["lora", *adapter]] if adapter is not None else []
        extra_keys: list[list[object] | None] = [[*lora] or None for _ in event.hashes]
        if event.cache_salt is not None and event.parent is None:
            extra_keys[0] = [*lora, event.cache_salt]
        return {
            "type": "BlockStored",
            "block_hashes": [_low64(block_hash) for block_hash in event.hashes],
            "parent_block_hash": None if event.parent is None else _low64(event.parent),
            "token_ids": event.token_ids,
            "block_size": self._block_tokens,
            "lora_id": None,
            "medium": _MEDIUM,
            "lora_name": adapter[0] if adapter is not None else None,
            "extra_keys": extra_keys,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }


@dataclass(frozen=True)
class Faults:
    """What happens to messages on their way, in percent of them; not to replays."""

    lost: int = 0
    repeated: int = 0
    late: int = 0  # overtaken by the next one

    def wire(self, messages: list[list[bytes]], random: Random) -> list[list[bytes]]:
        """The messages that arrive."""
        arrives: list[list[bytes]] = []
        for message in messages:
            if random.randrange(100) >= self.lost:
                arrives.append(message)
                if random.randrange(100) < self.repeated:
                    arrives.append(message)
                if len(arrives) > 1 and random.randrange(100) < self.late:
                    arrives[-2:] = reversed(arrives[-2:])
        return arrives


@dataclass(eq=False)
class EventPublisher:
    """A PUB socket and its encoder. ZMQ drops events without a subscriber.

    Attributes:
        replay_endpoint: repeats the last `buffer_steps` messages on request, as in vLLM; needs a
            running loop. None for no replays.
    """

    endpoint: str  # where messages go
    topic: str  # of each message
    block_tokens: int  # tokens of a block
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    faults: Faults | None = None  # what happens to messages on their way, drawn with `seed`
    seed: int | None = None

    def __post_init__(self) -> None:
        self._encoder = EventEncoder(self.block_tokens)
        self._topic = self.topic.encode()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 100_000)
        self._kept: deque[list[bytes]] = deque(maxlen=self.buffer_steps)
        self._random = Random(self.seed)
        self._delayed: list[list[bytes]] = []
        self._replays: Inbox | None = None
        endpoint = self.endpoint
        if "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc:", "inproc:")):
            self._socket.bind(endpoint)
        else:
            self._socket.connect(endpoint)
        if self.replay_endpoint is not None:
            router = self._context.socket(zmq.ROUTER)
            router.bind(self.replay_endpoint)
            self._replays = Inbox(router, self._replay)

    @property
    def ports(self) -> tuple[int, int | None]:
        """The port of the messages, and that of the replays, if bound."""
        replays = None if self._replays is None else _port(self._replays.socket)
        return _port(self._socket), replays

    def publish(self, events: list[Event]) -> None:
        """Send a batch, unless it is empty."""
        if not events:
            return
        message = self._encoder.frames(self._topic, events)
        self._kept.append(message)
        if self.faults is None:
            self._socket.send_multipart(message, zmq.NOBLOCK)
            return
        self._delayed.append(message)
        if len(self._delayed) > 1 or self._random.randrange(100) >= self.faults.late:
            sent, self._delayed = self.faults.wire(self._delayed, self._random), []
            for each in sent:
                self._socket.send_multipart(each, zmq.NOBLOCK)

    def close(self) -> None:
        """Close the sockets and their thread. Unsent events are dropped."""
        if self._replays is not None:
            self._replays.close()
        self._socket.close(linger=0)
        self._context.term()

    def _replay(self, frames: Sequence[bytes]) -> None:
        """Answer like vLLM's `ZmqEventPublisher._service_replay`."""
        if self._replays is None or len(frames) != 3:
            return
        client, _, start = frames
        for topic, number, payload in self._kept:
            if number >= start:
                self._answer(client, topic, number, payload)
        self._answer(client, b"", _END, b"")

    def _answer(self, *frames: bytes) -> None:
        assert self._replays is not None
        self._replays.socket.send_multipart([frames[0], b"", *frames[1:]], zmq.NOBLOCK)


def _port(socket: "zmq.Socket[bytes]") -> int:
    return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
