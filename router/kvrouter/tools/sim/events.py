"""KV events as vLLM 0.32 publishes them: three ZMQ frames, the last one msgpack. Never blocks.

Shapes: vllm/distributed/kv_events.py. A block's id is the low 64 bits of its hash. As in vLLM, the
publisher binds only `*`, `::`, ipc and inproc addresses, and connects to others.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import msgspec

from kvrouter.tools.sim.block_cache import Cleared, Event, Removed
from kvrouter_store.events.publisher import EventSockets


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
                "medium": event.medium,
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
            "block_size": self._block_tokens if event.token_ids else 0,
            "lora_id": None,
            "medium": event.medium,
            "lora_name": adapter[0] if adapter is not None else None,
            "extra_keys": extra_keys,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention" if event.token_ids else None,
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
    """A PUB socket and its encoder. ZMQ drops events without a subscriber."""

    endpoint: str  # where messages go
    topic: str  # of each message
    block_tokens: int  # tokens of a block
    # Repeats the last `buffer_steps` messages on request, as in vLLM; needs a running loop. None
    # for no replays.
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    faults: Faults = Faults()  # what happens to messages on their way, drawn with `seed`
    seed: int | None = None

    def __post_init__(self) -> None:
        self._encoder = EventEncoder(self.block_tokens)
        self._topic = self.topic.encode()
        self._random = Random(self.seed)
        self._delayed: list[list[bytes]] = []
        bind = any(sign in self.endpoint for sign in ("*", "::", "ipc:", "inproc:"))
        self._sockets = EventSockets(
            self.endpoint, self.replay_endpoint, self.buffer_steps, bind=bind
        )

    @property
    def ports(self) -> tuple[int, int | None]:
        """The port of the messages, and that of the replays, if bound."""
        return self._sockets.ports

    @property
    def source(self) -> dict[str, object]:
        """Where it publishes, as in vLLM's `KVEventsConfig` (config/kv_events.py)."""
        events, replays = self.endpoint, self.replay_endpoint
        if events.startswith("tcp:"):  # each with the port that it got
            ports = self.ports
            events = f"{events.rpartition(':')[0]}:{ports[0]}"
            replays = replays and f"{replays.rpartition(':')[0]}:{ports[1]}"
        told = {"endpoint": events, "replay_endpoint": replays, "topic": self.topic}
        kept = {"buffer_steps": self.buffer_steps, "hwm": 100_000, "max_queue_size": 100_000}
        return {"enable_kv_cache_events": True, "publisher": "zmq", **told, **kept}

    def publish(self, events: list[Event]) -> None:
        """Send a batch, unless it is empty."""
        if not events:
            return
        message = self._encoder.frames(self._topic, events)
        self._sockets.kept.append(message)
        self._delayed.append(message)
        if len(self._delayed) > 1 or self._random.randrange(100) >= self.faults.late:
            sent, self._delayed = self.faults.wire(self._delayed, self._random), []
            for each in sent:
                self._sockets.send(each)

    def close(self) -> None:
        """Close the sockets and their thread. Unsent events are dropped."""
        self._sockets.close()
