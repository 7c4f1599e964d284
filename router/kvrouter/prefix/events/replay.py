"""Asks publishers of KV events to repeat messages, as vLLM and SGLang answer it.

The publisher binds a ROUTER. A request is an empty frame and the first number wanted (8 bytes
big-endian); answers are an empty frame, topic, number and payload, in order, and last the number
-1. vLLM before 0.20 sends no topic. Sources: `ZmqEventPublisher._service_replay` of vLLM 0.32 and
SGLang 0.5. What goes beyond 1,000 queued answers ZMQ drops, the last one too: whoever asks must
expect holes.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import zmq

from kvrouter.prefix.events.messages import BadMessage, decode_sequence
from kvrouter.prefix.events.sockets import MAX_MESSAGE_BYTES, QUEUED_MESSAGES, Inbox, endpoint_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvrouter.engines.engine import Engine
    from kvrouter.prefix.events.tracker import CacheTracker

ANSWER_S: Final = 2.0
"""A publisher that sends nothing for so long is not answering; vLLM looks ten times a second."""
END: Final = (1 << 64) - 1
"""The number of the last answer: -1."""


class Replayer:
    """Asks, one replay per publisher at a time.

    Each has a socket of its own: what is answered too late cannot be taken for another's answer.

    Args:
        context: of the sockets.
        ports: at which publishers repeat messages, by the engine's address; under "" that of all
            others. A data-parallel rank's is that plus its number.
        tracker: is given the answers.
        answer_s: see `ANSWER_S`.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        ports: Mapping[str, int],
        tracker: CacheTracker,
        answer_s: float = ANSWER_S,
    ) -> None:
        self._context = context
        self._ports = ports
        self._tracker = tracker
        self._answer_s = answer_s
        self._asked: dict[tuple[Engine, int], _Replay] = {}

    def ask(self, server: Engine, rank: int, start: int) -> bool:
        """Have the messages of a rank from `start` on repeated; False where no port is known."""
        port = self._ports.get(server.address, self._ports.get("", 0))
        if not port:
            return False
        self._end(server, rank)
        endpoint = endpoint_of(server.host, port + rank)
        self._asked[server, rank] = _Replay(self, server, rank, endpoint, start)
        return True

    def close(self) -> None:
        """Ask no more. Idempotent."""
        for server, rank in list(self._asked):
            self._end(server, rank)

    def _end(self, server: Engine, rank: int) -> None:
        replay = self._asked.pop((server, rank), None)
        if replay is not None:
            replay.close()


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
        socket = owner._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, QUEUED_MESSAGES)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.IPV6, "[" in endpoint)
        socket.connect(endpoint)
        socket.send_multipart([b"", start.to_bytes(8, "big")], zmq.NOBLOCK)
        self._inbox = Inbox(socket, self._take)
        self._timer = self._loop.call_later(owner._answer_s, self._look)

    def close(self) -> None:
        """Wait for no more answers."""
        self._timer.cancel()
        self._inbox.close()

    def _take(self, frames: Sequence[bytes]) -> None:
        self._heard_s = self._loop.time()
        if len(frames) not in (3, 4):
            raise BadMessage(f"a replay of {len(frames)} frames")
        sequence = decode_sequence(frames[-2])
        if sequence != END:
            self._owner._tracker.replayed(self._server, self._rank, sequence, frames[-1])
            return
        self._owner._end(self._server, self._rank)
        self._owner._tracker.replay_ended(self._server, self._rank)

    def _look(self) -> None:
        """Give up when nothing has come for a while."""
        left_s = self._heard_s + self._owner._answer_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
            return
        self._owner._end(self._server, self._rank)
        self._owner._tracker.replay_failed(self._server, self._rank)
