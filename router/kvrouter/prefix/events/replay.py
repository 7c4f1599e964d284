"""Asks publishers of KV events to repeat messages, in the protocol of vLLM and SGLang.

The publisher binds a ROUTER. A request is an empty frame and the first number wanted (8 bytes
big-endian). Answers are an empty frame, topic, number and payload, in order, and last the number
-1. vLLM before 0.20 sends no topic. Sources: `ZmqEventPublisher._service_replay` of vLLM 0.32 and
SGLang 0.5. ZMQ drops answers beyond 1,000 queued ones, even the last one: answers may have holes.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import zmq

from kvrouter.prefix.events.messages import BadMessage, decode_sequence
from kvrouter_store.events.sockets import Inbox, endpoint_of, open_socket

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvrouter.engines.engine import Engine
    from kvrouter.prefix.events.tracker import CacheTracker
    from kvrouter_store.events.sockets import Turns

ANSWER_S: Final = 2.0
"""Silence of a publisher after which a replay has failed; vLLM polls ten times a second."""
END: Final = (1 << 64) - 1
"""The number of the last answer: -1."""


@dataclass(eq=False)
class Replayer:
    """Runs one replay per publisher at a time, each on a socket of its own.

    `ports` are those of replays, by the engine's address; under "" that of all others. A
    data-parallel rank adds its number.
    """

    context: zmq.Context[zmq.Socket[bytes]]
    ports: Mapping[str, int]
    tracker: CacheTracker
    turns: Turns
    answer_s: float = ANSWER_S

    def __post_init__(self) -> None:
        self._replays: dict[tuple[Engine, int], _Replay] = {}

    def ask(self, server: Engine, rank: int, start: int) -> bool:
        """Request the messages of a rank from `start` on; False: no port is known, or no socket."""
        port = self.ports.get(server.address, self.ports.get("", 0))
        if not port:
            return False
        self.end(server, rank)
        endpoint = endpoint_of(server.host, port + rank)
        try:
            self._replays[server, rank] = _Replay(self, server, rank, endpoint, start)
        except zmq.ZMQError as error:
            text = "KV events of %s: its publisher cannot be asked: %s"
            self.tracker.counts.warn("unasked", text, server.address, error)
            return False
        return True

    def end(self, server: Engine, rank: int) -> None:
        """End the replay of a rank, if there is one."""
        replay = self._replays.pop((server, rank), None)
        if replay is not None:
            replay.close()

    def close(self) -> None:
        """End all replays. Idempotent."""
        for server, rank in list(self._replays):
            self.end(server, rank)


class _Replay:
    """One request and its answers."""

    def __init__(
        self, owner: Replayer, server: Engine, rank: int, endpoint: str, start: int
    ) -> None:
        self._owner = owner
        self._server = server
        self._rank = rank
        self._loop = asyncio.get_running_loop()
        self._heard_s = self._loop.time()
        socket = open_socket(owner.context, zmq.DEALER)
        socket.setsockopt(zmq.IPV6, "[" in endpoint)
        socket.connect(endpoint)
        socket.send_multipart([b"", start.to_bytes(8, "big")], zmq.NOBLOCK)
        self._inbox = Inbox(socket, self._take, owner.turns)
        self._timer = self._loop.call_later(owner.answer_s, self._check)

    def close(self) -> None:
        """Close the socket."""
        self._timer.cancel()
        self._inbox.close()

    def _take(self, frames: Sequence[bytes]) -> None:
        self._heard_s = self._loop.time()
        if len(frames) not in (3, 4):
            raise BadMessage(f"a replay of {len(frames)} frames")
        sequence = decode_sequence(frames[-2])
        if sequence != END:
            self._owner.tracker.replayed(self._server, self._rank, sequence, frames[-1])
            return
        self._owner.end(self._server, self._rank)
        self._owner.tracker.replay_ended(self._server, self._rank)

    def _check(self) -> None:
        """Give up after a silence."""
        left_s = self._heard_s + self._owner.answer_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._check)
            return
        self._owner.end(self._server, self._rank)
        self._owner.tracker.replay_failed(self._server, self._rank)
