"""KV events as vLLM 0.32 publishes them: three ZMQ frames, the last msgpack. Never blocks.

Shapes: vllm/distributed/kv_events.py. A block's id is the low 64 bits of its hash. As in vLLM, a
concrete address is connected to; only `*`, `::`, ipc and inproc addresses are bound.
"""

import time
from collections.abc import Callable

import msgspec
import zmq

from kvrouter.sim.block_cache import Cleared, Event, Removed

__all__ = ["EventEncoder", "EventPublisher"]

_MEDIUM = "GPU"


def _low64(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-8:], "big")


class EventEncoder:
    """Events to payloads, and a sequence number to each, from 0. Knows no socket."""

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
        extra_keys: list[list[str] | None] = [None] * len(event.hashes)
        if event.cache_salt is not None and event.parent is None:
            extra_keys[0] = [event.cache_salt]
        return {
            "type": "BlockStored",
            "block_hashes": [_low64(block_hash) for block_hash in event.hashes],
            "parent_block_hash": None if event.parent is None else _low64(event.parent),
            "token_ids": event.token_ids,
            "block_size": self._block_tokens,
            "lora_id": None,
            "medium": _MEDIUM,
            "lora_name": None,
            "extra_keys": extra_keys,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }


class EventPublisher:
    """A PUB socket and its encoder. Events that nobody takes are dropped, as ZMQ does."""

    def __init__(self, endpoint: str, topic: str, block_tokens: int) -> None:
        self._encoder = EventEncoder(block_tokens)
        self._topic = topic.encode()
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 100_000)
        if "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc:", "inproc:")):
            self._socket.bind(endpoint)
        else:
            self._socket.connect(endpoint)

    def publish(self, events: list[Event]) -> None:
        """Send a batch; nothing happens for an empty one."""
        if events:
            self._socket.send_multipart(self._encoder.frames(self._topic, events), zmq.NOBLOCK)

    def close(self) -> None:
        """Give the socket and its thread back. Unsent events are dropped."""
        self._socket.close(linger=0)
        self._context.term()
