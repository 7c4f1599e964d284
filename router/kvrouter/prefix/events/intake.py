"""The sockets of KV events: publishers that connect to the router, and those it connects to.

And replays, in the protocol of vLLM and SGLang: the publisher binds a ROUTER. A request is an empty
frame and the first number wanted (8 bytes big-endian). Answers are an empty frame, topic, number
and payload, in order, and last the number -1. vLLM before 0.20 sends no topic. Sources:
`ZmqEventPublisher._service_replay` of vLLM 0.32 and SGLang 0.5. ZMQ drops answers beyond 1,000
queued ones, even the last one: answers may have holes.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvrouter.prefix.events.messages import BadMessage, decode_sequence
from kvrouter.prefix.events.tracker import TOPIC_PREFIX, CacheTracker
from kvrouter_store.events.sockets import (
    Inbox,
    Turns,
    endpoint_of,
    open_context,
    open_socket,
    subscriber,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvrouter.engines.engine import Engine

ANSWER_S: Final = 2.0
"""Silence of a publisher after which a replay has failed; vLLM polls ten times a second."""
END: Final = (1 << 64) - 1  # the number of the last answer: -1

log = logging.getLogger(__name__)


@dataclass(eq=False)
class EventIntake:
    """All sockets of KV events, on the running loop; its owner calls `close`.

    `ports` are those of publishers that listen, by the engine's address; under "" that of all
    others; `replay_ports` those at which publishers repeat messages, in the same way. In place of
    those that are missing count those that engines tell. OSError: `bind`, the address to which
    others connect, cannot be bound.
    """

    tracker: CacheTracker  # takes the messages
    ports: Mapping[str, int]
    replay_ports: Mapping[str, int]
    bind: str | None = None  # None: no publisher connects to the router

    def __post_init__(self) -> None:
        self._opened: zmq.Context[zmq.Socket[bytes]] | None = None
        turns = Turns(self.tracker.work)
        self.tracker.wake = turns.wake
        self.subscriber: EventSubscriber | None = None
        if self.bind is not None:
            try:
                self.subscriber = EventSubscriber(self.bind, self.tracker, self._context(), turns)
            except OSError:
                self._context().destroy(linger=0)
                raise
        self._connector = EventConnector(self._context, self.ports, self.tracker, turns)
        self._replayer = Replayer(
            self._context, self.replay_ports, self.tracker, turns, told=self._connector.told_replays
        )
        if self.replay_ports or self.bind is None:
            self.tracker.replays = self._replayer

    def listen(self, engine: Engine) -> None:
        """`engine` joined: listen to its publisher."""
        if self.subscriber is not None:
            self.subscriber.engine_joined(engine)
        self._connector.engine_joined(engine)

    def forget(self, engine: Engine) -> None:
        """`engine` will not come back."""
        self._connector.forget(engine)

    def close(self) -> None:
        """Close every socket. Idempotent."""
        self._replayer.close()
        self._connector.close()
        if self.subscriber is not None:
            self.subscriber.close()
        self._context().destroy(linger=0)

    def _context(self) -> zmq.Context[zmq.Socket[bytes]]:
        """That of all sockets, opened with the first one: engines may tell of no publisher."""
        if self._opened is None:
            self._opened = open_context()
        return self._opened


class EventSubscriber:
    """A bound SUB socket, to which engines connect their publishers.

    Each data-parallel rank publishes to the endpoint's port plus its number
    (`ZmqEventPublisher.offset_endpoint_port` of vLLM and SGLang). Those ports are bound when an
    engine with such ranks joins, and stay bound.

    `endpoint` is tcp://HOST:PORT (port 0 takes a free one) or ipc:///PATH; OSError: it cannot be
    bound.
    """

    def __init__(
        self,
        endpoint: str,
        tracker: CacheTracker,
        context: zmq.Context[zmq.Socket[bytes]],
        turns: Turns,
    ) -> None:
        self._socket = subscriber(context, TOPIC_PREFIX.encode(), endpoint)
        try:
            self._socket.bind(endpoint.replace(":0", ":*") if endpoint.endswith(":0") else endpoint)
        except zmq.ZMQError as error:
            self._socket.close()
            raise OSError(
                error.errno, f"--kv-events-bind {endpoint}: {os.strerror(error.errno or 0)}"
            ) from None
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._event_ranks = {0}
        self._closed = False
        self._inbox = Inbox(self._socket, tracker.receive, turns)

    def engine_joined(self, engine: Engine) -> None:
        """Bind the port of its rank. If it is in use, that is logged, and its events are lost."""
        rank = engine.event_rank
        if rank in self._event_ranks or self._closed or not self.endpoint.startswith("tcp:"):
            return
        self._event_ranks.add(rank)
        host, _, port = self.endpoint.rpartition(":")
        endpoint = f"{host}:{int(port) + rank}"
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            log.error(
                "KV events of data-parallel ranks %d cannot be taken at %s: %s; give "
                "--kv-events-bind a port behind which as many are free as there are ranks",
                rank,
                endpoint,
                os.strerror(error.errno or 0),
            )

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._closed = True
        self._inbox.close()


@dataclass(eq=False)
class EventConnector:
    """A SUB socket for each engine whose publisher is bound, as vLLM's is by default.

    It connects when an engine joins, to its host and the port of its publisher plus the number of a
    data-parallel rank, and reconnects until the engine is forgotten. The tracker finds out what was
    lost meanwhile. The connection shows the sender of a message: topics are ignored.

    `ports` are those of publishers, by the engine's address; under "" that of all others. An engine
    without one may tell its own.
    """

    context: Callable[[], zmq.Context[zmq.Socket[bytes]]]
    ports: Mapping[str, int]
    tracker: CacheTracker
    turns: Turns

    def __post_init__(self) -> None:
        self._inboxes: dict[Engine, tuple[tuple[int, int], Inbox, Inbox]] = {}
        self.told_replays: dict[Engine, int] = {}
        """Where engines say that they repeat messages, once their publisher is connected: none is
        to seem well known by replays alone."""

    def engine_joined(self, engine: Engine) -> None:
        """Connect to its publisher, unless that was done before, or elsewhere than before.

        If no more sockets can be opened, that is logged, and its events are lost.
        """
        known = self._inboxes.get(engine)
        port = _port_of(self.ports, engine.server, engine.event_rank)
        ports = (port, 0) if port else engine.event_ports
        if known is not None and known[0] == ports:
            return
        self.forget(engine)
        if ports is None:
            return
        try:
            self._inboxes[engine] = (ports, *self._connect(engine, ports))
        except zmq.ZMQError as error:
            self.tracker.forget(engine)  # a replay tells what it holds now, but not what follows
            log.warning("KV events of %s are not taken: %s", engine.address, error)

    def _connect(self, engine: Engine, ports: tuple[int, int]) -> tuple[Inbox, Inbox]:
        server, seen = engine.server, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        port, replays = ports
        endpoint = endpoint_of(server.host, port)
        with ExitStack() as opened:
            socket = subscriber(self.context(), b"", endpoint)
            opened.callback(socket.close)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
            opened.callback(socket.disable_monitor)
            monitor = socket.get_monitor_socket(seen)
            opened.callback(monitor.close)
            socket.connect(endpoint)
            opened.pop_all()

        def take(frames: Sequence[bytes]) -> None:
            self.tracker.receive_from(server, frames)

        def note(frames: Sequence[bytes]) -> None:
            if parse_monitor_message(list(frames))["event"] == zmq.EVENT_DISCONNECTED:
                self.tracker.disconnected(engine)
                return
            self.told_replays[engine] = replays
            self.tracker.connected(engine)

        return Inbox(socket, take, self.turns), Inbox(monitor, note, self.turns)

    def forget(self, engine: Engine) -> None:
        """`engine` will not come back."""
        self.told_replays.pop(engine, None)
        if (known := self._inboxes.pop(engine, None)) is not None:
            _, inbox, monitor = known
            inbox.socket.disable_monitor()
            monitor.close()
            inbox.close()

    def close(self) -> None:
        """Close every connection. Idempotent."""
        for engine in list(self._inboxes):
            self.forget(engine)


@dataclass(eq=False)
class Replayer:
    """Runs one replay per publisher at a time, each on a socket of its own.

    `ports` are those of replays, by the engine's address; under "" that of all others. A
    data-parallel rank adds its number. `told` are those that targets tell.
    """

    context: Callable[[], zmq.Context[zmq.Socket[bytes]]]
    ports: Mapping[str, int]
    tracker: CacheTracker
    turns: Turns
    answer_s: float = ANSWER_S
    told: Mapping[Engine, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._replays: dict[tuple[Engine, int], _Replay] = {}

    def ask(self, server: Engine, rank: int, start: int) -> bool:
        """Request the messages of a rank from `start` on; False: no port is known, or no socket."""
        target = server.rank_of_events(rank) or server
        port = _port_of(self.ports, server, rank) or self.told.get(target, 0)
        if not port:
            return False
        self.end(server, rank)
        endpoint = endpoint_of(server.host, port)
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


def _port_of(ports: Mapping[str, int], server: Engine, rank: int) -> int:
    """The configured port of a rank; 0: none."""
    port = ports.get(server.address, ports.get("", 0))
    return port + rank if port else 0


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
        socket = open_socket(owner.context(), zmq.DEALER, endpoint)
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
